"""What several of these tests start from."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the quickstart's network before any training."""
    from nemo_rl.quickstart.models import make_model, make_tokenizer, student

    directory = tmp_path_factory.mktemp("fresh")
    tokenizer = make_tokenizer()
    make_model(tokenizer, student(0)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
