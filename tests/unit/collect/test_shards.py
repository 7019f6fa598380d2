"""The files of shards."""

from nemo_rl.collect.shards import ShardFiles, find_shards


def test_shards_are_found_by_seed_and_chunk(tmp_path):
    for seed, chunk in ((10, None), (2, 11), (2, 3)):
        ShardFiles.of(tmp_path, seed, chunk).identity.touch()
    (tmp_path / "rollouts_identity.json").touch()  # of a merge
    (tmp_path / "rollouts-rsx_identity.json").touch()
    names = [files.name for files in find_shards(tmp_path)]
    assert names == ["rollouts-rs2-chunk3", "rollouts-rs2-chunk11", "rollouts-rs10"]
