from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nemo_rl.observability.loggers import TensorboardLogger


def test_scalars_tables_and_configuration_are_read_back(tmp_path: Path) -> None:
    logger = TensorboardLogger(tmp_path, {"grpo": {"seed": 42}})
    logger.log_metrics({"train/loss": 0.5, "train/reward": 0.25}, 1)
    logger.log_metrics({"train/loss": 0.125}, 2)
    logger.log_table("validation/samples", ("prompt", "reward"), [("a|b\n<c>", 1.0)], 2)
    logger.close()

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.125)]
    assert [(e.step, e.value) for e in events.Scalars("train/reward")] == [(1, 0.25)]
    [table] = events.Tensors("validation/samples/text_summary")
    assert table.step == 2
    assert table.tensor_proto.string_val[0].decode() == "| prompt | reward |\n| --- | --- |\n| a\\|b<br>&lt;c> | 1.0 |"
    [config] = events.Tensors("config/text_summary")
    assert '"seed": 42' in config.tensor_proto.string_val[0].decode()
