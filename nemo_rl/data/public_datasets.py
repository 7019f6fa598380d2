"""Public datasets by name: their place on the Hugging Face hub; public_rows.py reads their rows."""

from dataclasses import replace

from nemo_rl.config.data import DatasetConfig, DatasetEntry
from nemo_rl.data.public_rows import (
    hub_entry,
    load_oasst,
    read_dapo,
    read_gpqa,
    read_helpsteer,
    read_mmlu,
    read_mmlu_csv,
    read_mmlu_pro,
    read_numina,
    read_squad,
)
from nemo_rl.data.row_sources import load_csv_rows, load_hub_rows, require_path_of

OPEN_MATH_INSTRUCT_2 = hub_entry(
    data_path="nvidia/OpenMathInstruct-2",
    split="train_1M",
    input_key="problem",
    output_key="expected_answer",
    sft_defaults=DatasetConfig(output_key="generated_solution"),
)
DEEP_SCALER = hub_entry(
    data_path="agentica-org/DeepScaleR-Preview-Dataset", split="train", input_key="problem", output_key="answer"
)
AIME_2024 = hub_entry(data_path="HuggingFaceH4/aime_2024", split="train", input_key="problem", output_key="answer")
AIME_2025 = hub_entry(
    data_path="opencompass/AIME2025",
    subsets=("AIME2025-I", "AIME2025-II"),
    split="test",
    input_key="question",
    output_key="answer",
)
AIME_2026 = hub_entry(data_path="MathArena/aime_2026", split="train", input_key="problem", output_key="answer")
DAPO_MATH_17K = hub_entry(read_dapo, data_path="BytedTsinghua-SIA/DAPO-Math-17k", split="train")
DAPO_MATH_AIME_2024 = hub_entry(read_dapo, data_path="BytedTsinghua-SIA/AIME-2024", split="train")
NUMINA_MATH = hub_entry(read_numina, data_path="AI-MO/NuminaMath-1.5", split="train")
OPEN_R1_MATH = hub_entry(
    data_path="open-r1/OpenR1-Math-220k", subset="default", split="train", input_key="problem", output_key="answer"
)
MATH_500 = hub_entry(data_path="HuggingFaceH4/MATH-500", split="test", input_key="problem", output_key="answer")
GSM8K = hub_entry(
    data_path="openai/gsm8k",
    subset="main",
    split="train",
    input_key="question",
    output_key="answer",
    processor="final_answer",
)
TULU3_SFT_MIXTURE = hub_entry(data_path="allenai/tulu-3-sft-mixture", split="train")
NEMOTRON_CASCADE_MATH = hub_entry(data_path="nvidia/Nemotron-Cascade-2-SFT-Data", subset="math", split="train")
SQUAD = hub_entry(read_squad, data_path="rajpurkar/squad", split="train")
HELPSTEER3 = replace(
    hub_entry(read_helpsteer, data_path="nvidia/HelpSteer3", subset="preference", split="train"),
    make_pairs=lambda section, seed: load_hub_rows(section, section.subset),  # both responses
)
TULU3_PREFERENCE = hub_entry(data_path="allenai/llama-3.1-tulu-3-8b-preference-mixture", split="train")
OPEN_ASSISTANT = DatasetEntry(DatasetConfig, make=load_oasst)
MMLU = hub_entry(read_mmlu, data_path="cais/mmlu", subset="all", split="test", choices=True)
MMLU_CSV = DatasetEntry(
    DatasetConfig,
    make=lambda section, seed: map(read_mmlu_csv, load_csv_rows(section)),
    check=require_path_of,
    has_choices=True,
)
MMLU_PRO = hub_entry(read_mmlu_pro, data_path="TIGER-Lab/MMLU-Pro", split="test", choices=True)
GPQA = hub_entry(read_gpqa, data_path="Idavidrein/gpqa", subset="gpqa_main", split="train", choices=True)
GPQA_DIAMOND = hub_entry(read_gpqa, data_path="Idavidrein/gpqa", subset="gpqa_diamond", split="train", choices=True)
