"""Small repositories with one bug each, and a tiny policy that chooses between patches, for any harness.

The policy is taught by demonstrations that the harness itself records: against a scripted engine it runs each patch on
each task. Lines of its prompts and the scripted replies become tokens, so that a prompt of 50,000 bytes has a few
hundred tokens and a reply is one. The demonstrations have every patch on every task, the right one twice, so the policy
begins by guessing, right half of the time.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nemo_rl.environments.ecosystem.harbor import HarborAgent, HarborConfig
from nemo_rl.types import Message, Prompt
from tests.support.harness_sessions import SUBMIT, TEMPLATE, run_shell, serve
from tests.templates import byte_tokenizer
from tests.unit.gateway.engines import SpeakingGeneration

FILE = "arrays.py"
WORKING = """def difference(a, b):
    return a - b


def largest(values):
    return max(values)


def first(values):
    return values[0]
"""


@dataclass(frozen=True)
class Bug:
    """A change of `WORKING`, its report, and the command that undoes it."""

    right: str
    wrong: str
    report: str
    test: str

    @property
    def patch(self) -> str:
        return f"sed -i 's/{self.wrong}/{self.right}/' {FILE}"


BUGS = (
    Bug("a - b", "a + b", "difference(5, 3) is 8", "difference(5, 3) == 2"),
    Bug("max(", "min(", "largest([1, 9, 4]) is 1", "largest([1, 9, 4]) == 9"),
    Bug(r"values\[0\]", r"values\[1\]", "first([7, 8]) is 8", "first([7, 8]) == 7"),
)
SPECIAL = "<|"  # begins the template's own tokens
MIN_LINE_BYTES = 3
TURN_START, TURN_END = "<|im_start|>assistant\n", "<|im_end|>"


def write_tasks(directory: Path) -> list[Path]:
    """Write one Harbor task per bug; return their directories."""
    tasks = []
    for i, bug in enumerate(BUGS):
        task = directory / f"bug-{i}"
        for part in ("environment", "tests"):
            (task / part).mkdir(parents=True)
        plain = {name: value.replace("\\", "") for name, value in vars(bug).items()}
        (task / "task.toml").write_text("version = '1.0'\n")
        (task / "instruction.md").write_text(f"In {FILE}, {bug.report}. Repair it.\n")
        (task / "environment" / FILE).write_text(WORKING.replace(plain["right"], plain["wrong"]))
        check = f"python3 -c 'from arrays import *; assert {bug.test}'"
        reward = "/logs/verifier/reward.txt"
        (task / "tests" / "test.sh").write_text(
            f"cd /app\nif {check}; then echo 1 > {reward}; else echo 0 > {reward}; fi\n"
        )
        tasks.append(task)
    return tasks


def reply(prompt: str, patch: str, steps: Sequence[str]) -> str:
    """Return the patch as a call, then the further steps; a side call gets a title."""
    num_results = prompt.split("</tools>", 1)[-1].count("<tool_response>")
    if num_results == 0:
        return run_shell(prompt, patch) or "A title"
    if num_results <= len(steps):
        return run_shell(prompt, steps[num_results - 1]) or ""
    return "It is repaired."


def demonstrate(section: HarborConfig, tasks: Sequence[Path]) -> list[str]:
    """Return the text of each history when the harness runs each patch on each task, the right one twice."""

    async def main() -> list[str]:
        texts: list[str] = []
        for task, bug in itertools.product(tasks, BUGS):
            steps = [SUBMIT] if "mini" in str(section.command) else []
            engine = SpeakingGeneration(
                TEMPLATE, lambda request, prompt, bug=bug, steps=steps: reply(prompt, bug.patch, steps)
            )
            server = await serve(engine)
            try:
                session_id = server.open_session(seed=1)
                message = Message("user", (task / "instruction.md").read_text().strip())
                prompt = Prompt("p", "harbor", (message,), {"task_directory": str(task)})
                agent = HarborAgent("harbor", section)
                result = await agent.run(prompt, server.session_url(session_id), session_id)
                is_right = BUGS[tasks.index(task)] is bug
                assert result.response_fault is None, result
                assert result.rewards == {"harbor": float(is_right)}, (task, bug, result)
                tokenizer = byte_tokenizer(TEMPLATE)
                for chain in server.close_session(session_id).chains():
                    ids = [i for m in chain.message_log for i in m.token_ids]
                    texts += [str(tokenizer.decode(ids, skip_special_tokens=False))] * (2 if is_right else 1)
            finally:
                await server.close()
        return texts

    return asyncio.run(main())


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a byte tokenizer with the lines that several histories share, and the replies, as tokens."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update({line for line in text.splitlines(keepends=True) if SPECIAL not in line})
    lines = [line for line, count in counts.items() if count > 1 and len(line) >= MIN_LINE_BYTES]
    replies = {said for text in texts for _, said in split_turns(text)}
    tokenizer = byte_tokenizer(TEMPLATE)
    added: Any = [AddedToken(each, normalized=False) for each in sorted({*lines, *replies})]
    tokenizer.add_tokens(added)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def split_turns(text: str) -> list[tuple[str, str]]:
    """Return (what comes before it, what is said) of each turn of the assistant, without its end."""
    turns, at = [], 0
    while (start := text.find(TURN_START, at)) >= 0:
        begin = start + len(TURN_START)
        at = text.find(TURN_END, begin)
        turns.append((text[:begin], text[begin:at]))
    return turns


def teach(directory: Path, texts: Sequence[str], *, num_steps: int = 150) -> dict[str, Any]:
    """Save a model that says what the demonstrations say, with its tokenizer; return facts about it."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(texts)
    rows = []
    for text in texts:
        before, said = split_turns(text)[-1]
        ids: list[int] = []
        labels: list[int] = []
        at = 0
        for prefix, answered in split_turns(text):
            context = tokenizer.encode(text[at : len(prefix)], add_special_tokens=False)
            sampled = tokenizer.encode(answered + TURN_END, add_special_tokens=False)
            ids += context + sampled
            labels += [-100] * len(context) + sampled
            at = len(prefix) + len(answered) + len(TURN_END)
        assert before + said + TURN_END == text[:at]
        rows.append((ids, labels))
    longest = max(len(ids) for ids, _ in rows)
    end: Any = tokenizer.eos_token_id
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * longest + 512,
        tie_word_embeddings=True,
        eos_token_id=end,
        pad_token_id=end,
    )
    model = LlamaForCausalLM(config)
    tokens = torch.tensor([ids + [end] * (longest - len(ids)) for ids, _ in rows])
    targets = torch.tensor([each + [-100] * (longest - len(each)) for _, each in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    loss = torch.tensor(0.0)
    for _ in range(num_steps):
        loss = model(input_ids=tokens, labels=targets).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return {"loss": float(loss.detach()), "tokens": longest, "vocabulary": len(tokenizer), "rows": len(rows)}
