"""The architectures that vLLM implements itself. Read from the source of its registry, since importing vLLM is slow."""

import ast
import importlib.util
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

REGISTRY = Path("model_executor", "models", "registry.py")  # vLLM 0.32
TRANSFORMERS_BACKEND = "transformers"  # the module of models that vLLM runs with transformers' own classes


@lru_cache
def own_architectures() -> frozenset[str]:
    """Return the names as in `architectures` of a config.json; none if vLLM is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return frozenset()
    tree = ast.parse((Path(spec.origin).parent / REGISTRY).read_text(encoding="utf-8"))
    return frozenset(name for name, module in _entries(tree) if module != TRANSFORMERS_BACKEND)


def _entries(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (architecture, module) of the registry's tables, which are dicts like {"Llama": ("llama", "Llama")}."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            match key, value:
                case ast.Constant(str(name)), ast.Tuple([ast.Constant(str(module)), ast.Constant(str())]):
                    yield name, module
