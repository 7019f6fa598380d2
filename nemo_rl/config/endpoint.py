"""A model behind servers of others: where they are, and what they are asked to bear."""

from pydantic import Field

from nemo_rl.config.section import Section


class EndpointLimitsConfig(Section):
    """What a server is asked to bear."""

    max_concurrency: int = Field(default=64, gt=0)  # requests at once, over all replicas
    requests_per_minute: float | None = Field(default=None, gt=0)
    tokens_per_minute: float | None = Field(default=None, gt=0)  # 4 characters are one; usage corrects it
    request_timeout_s: float = Field(default=60.0, gt=0)  # of one attempt
    max_retries: int = Field(default=3, ge=0)  # of a request that met 429, 5xx or no answer; never of another 4xx
    retry_backoff_s: float = Field(default=0.5, ge=0)  # before the first; doubles


class ServedModelConfig(Section):
    """A server over HTTP; several URLs are replicas, and the least busy one is asked."""

    base_urls: list[str] = Field(min_length=1)  # roots, with or without /v1
    model: str
    api_key_env: str | None = None  # the environment variable that holds the key
    limits: EndpointLimitsConfig = EndpointLimitsConfig()
