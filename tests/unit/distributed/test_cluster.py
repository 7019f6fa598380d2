import socket

import pytest
import ray

from nemo_rl.distributed.cluster import connect
from nemo_rl.errors import WorkerError


@pytest.mark.timeout(120)
def test_an_address_where_no_cluster_answers_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # whatever cluster other tests have started
    with socket.socket() as listens_to_nobody:
        listens_to_nobody.bind(("127.0.0.1", 0))
        port = listens_to_nobody.getsockname()[1]
        with pytest.raises(WorkerError, match=rf"no Ray cluster answers at '127\.0\.0\.1:{port}' \(cluster\.address"):
            connect(f"127.0.0.1:{port}")
