"""Rows for NeMo Gym, as JSON Lines.

make_rows.py quickstart                                            the two files of quickstart.yaml
make_rows.py reasoning-gym gcd chain_sum --size 5000 --output rows.jsonl
make_rows.py blend --output mix.jsonl --rows math.jsonl math_with_judge_simple_agent --rows tools.jsonl
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import reasoning_gym

from nemo_rl.data.rows import read_jsonl, to_jsonable
from nemo_rl.errors import DataError
from nemo_rl.quickstart.words import load_quickstart_prompts
from nemo_rl.types import Prompt

Row = dict[str, Any]

REASONING_GYM, MCQA = "reasoning_gym_simple_agent", "mcqa_simple_agent"
LAST_WORD = {"output_regex": r"([a-z]+)\W*$"}  # mcqa compares it with the text of the options


def main(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    try:
        parsed.run(parsed)
    except DataError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    quickstart = commands.add_parser("quickstart", help="words to spell backward, half of them for mcqa")
    quickstart.add_argument("--directory", type=Path, default=Path(os.environ.get("NEMO_GYM_DATA", "data/nemo_gym")))
    quickstart.set_defaults(run=make_quickstart)
    tasks = commands.add_parser("reasoning-gym", help="rows of tasks of reasoning_gym, which take turns")
    tasks.add_argument("tasks", nargs="+")
    tasks.add_argument("--size", type=int, default=1000, help="rows of each task")
    tasks.add_argument("--seed", type=int, default=0)
    tasks.add_argument("--output", type=Path, required=True)
    tasks.set_defaults(run=make_tasks)
    blend = commands.add_parser("blend", help="files as one, each spread evenly over the whole")
    blend.add_argument("--rows", nargs="+", action="append", required=True, metavar=("FILE", "AGENT"))
    blend.add_argument("--output", type=Path, required=True)
    blend.set_defaults(run=make_blend)
    return parser


def make_quickstart(parsed: argparse.Namespace) -> None:
    """Return the quickstart's words, alternating between two environments; no validation word is trained on."""
    for prompt_set, name in zip(load_quickstart_prompts(), ("train", "validation"), strict=True):
        rows = ((spelling_row, choice_row)[i % 2](prompt) for i, prompt in enumerate(prompt_set.prompts))
        write(parsed.directory / f"quickstart_{name}.jsonl", rows)


def spelling_row(prompt: Prompt) -> Row:
    return reasoning_gym_row(prompt.env_state["entry"])


def choice_row(prompt: Prompt) -> Row:
    """Return a choice between the word spelled backward and the word itself; the answer may be its text."""
    entry = prompt.env_state["entry"]
    return {
        **asking(entry["question"], MCQA),
        "options": [{"A": entry["metadata"]["word"]}, {"B": entry["answer"]}],
        "expected_answer": "B",
        "template_metadata": LAST_WORD,
    }


def make_tasks(parsed: argparse.Namespace) -> None:
    if unknown := sorted(set(parsed.tasks) - reasoning_gym.factory.DATASETS.keys()):
        raise DataError(f"reasoning_gym has no task {', '.join(unknown)}")
    sets = [reasoning_gym.create_dataset(task, size=parsed.size, seed=parsed.seed) for task in parsed.tasks]
    write(parsed.output, (reasoning_gym_row(entries[i]) for i in range(parsed.size) for entries in sets))


def reasoning_gym_row(entry: Row) -> Row:
    scored = {name: to_jsonable(entry[name]) for name in ("question", "answer", "metadata")}
    return {**asking(entry["question"], REASONING_GYM), **scored}


def make_blend(parsed: argparse.Namespace) -> None:
    sources = [list(with_agent(Path(file), *agent)) for file, *agent in parsed.rows]
    write(parsed.output, interleaved(sources))


def with_agent(path: Path, agent: str | None = None, *_: str) -> Iterator[Row]:
    """Return the file's rows; `agent` runs those that name none. Raises DataError for a row without any."""
    for number, row in enumerate(read_jsonl(path), start=1):
        if row.get("agent_ref") is None and agent is None:
            raise DataError(f"{path}: row {number} has no agent_ref: name the agent after the file")
        yield row if row.get("agent_ref") is not None else {**row, "agent_ref": reference(agent or "")}


def interleaved(sources: Sequence[Sequence[Row]]) -> Iterator[Row]:
    """All rows, those of each source in order and evenly spread: 2 and 4 rows give b a b b a b."""
    places = [
        ((index + 0.5) / len(rows), number, row)
        for number, rows in enumerate(sources)
        for index, row in enumerate(rows)
    ]
    return (row for _, _, row in sorted(places, key=lambda place: place[:2]))


def asking(question: str, agent: str) -> Row:
    parameters = {"input": [{"role": "user", "content": question}]}
    return {"responses_create_params": parameters, "agent_ref": reference(agent)}


def reference(agent: str) -> Row:
    return {"type": "responses_api_agents", "name": agent}


def write(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    sys.stderr.write(f"{path}: {count} rows\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
