"""HTTP requests to a server, a scorer or a teacher: paced, bounded, retried if that helps, with typed errors."""

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from nemo_rl.config.policy import ServedModelConfig
from nemo_rl.distributed.load_balancer import LoadBalancer
from nemo_rl.errors import ConfigError, NemoRLError
from nemo_rl.tracing import trace_headers

logger = logging.getLogger(__name__)

TOO_LARGE = 413  # the body, for the server or a proxy before it
RETRYABLE_STATUSES = frozenset({408, 425, 429})  # the 4xx that invite a retry
MAX_BACKOFF_S = 60.0
MAX_ERROR_TEXT_CHARACTERS = 300  # longest server text quoted in an error


class RateLimiter:
    """Lets units through at an even pace: the generic cell rate algorithm (ITU-T I.371) without bursts.

    Example: at 60 a minute the third of three callers at once waits 2 s; one that takes 5 units keeps the next for 5 s.
    """

    def __init__(
        self,
        rate: float | None,
        *,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Let `rate` units through per minute; None: no limit."""
        self._seconds_per_unit = 60.0 / rate if rate else 0.0
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._sleep = sleep
        self._free_at = 0.0

    async def take(self, units: float = 1.0) -> None:
        """Return when `units` more are allowed; callers are served in their order."""
        if not self._seconds_per_unit:
            return
        now = self._clock()
        starts_at = max(now, self._free_at)
        self._free_at = starts_at + units * self._seconds_per_unit
        if starts_at > now:
            await self._sleep(starts_at - now)

    def correct(self, units: float) -> None:
        """Add the units that a request took beyond its estimate; negative if it took fewer."""
        self._free_at += units * self._seconds_per_unit


class EndpointError(NemoRLError):
    """A request that no server answered; the text names the server and says why.

    `status` is that of the last HTTP response, None without one.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class ContextLengthExceeded(EndpointError):
    """The request holds more tokens than the served model takes."""


class _RetryableError(EndpointError):
    """A failure that a retry may overcome; `wait_s` is the wait that the server requires."""

    def __init__(self, text: str, status: int | None = None, wait_s: float | None = None) -> None:
        super().__init__(text, status)
        self.wait_s = wait_s


class Endpoint:
    """The replicas of one server, with one HTTP session for all requests. Used in one event loop."""

    def __init__(self, key: str, section: ServedModelConfig) -> None:
        """Prepare requests; raises ConfigError under `key`, the section's, if `api_key_env` is not set."""
        limits = section.limits
        self._section = section
        self._replicas = LoadBalancer(url.rstrip("/").removesuffix("/v1") for url in section.base_urls)
        self._requests = RateLimiter(limits.requests_per_minute)
        self._tokens = RateLimiter(limits.tokens_per_minute)
        self._concurrency = asyncio.Semaphore(limits.max_concurrency)
        self._headers = _headers(key, section.api_key_env)
        self._http: aiohttp.ClientSession | None = None

    async def post(
        self, path: str, body: Mapping[str, Any], *, num_tokens: int, caller_has_deadline: bool = False
    ) -> Any:
        """Return the JSON that a replica answers with; `num_tokens` is the estimate of what the request takes.

        A refused connection, no answer in `limits.request_timeout_s` (not counted if the caller has a deadline of
        its own), 408, 425, 429 and 5xx are retried, on another replica if there is one, after a backoff that doubles
        (or what Retry-After says); any other status is not. Raises EndpointError.
        """
        timeout_s = None if caller_has_deadline else self._section.limits.request_timeout_s
        return await self._request_with_retries(path, body, num_tokens, timeout_s)

    async def get(self, path: str) -> Any:
        """Return the JSON at `path`; retries and raises as `post`."""
        return await self._request_with_retries(path, None, 0, self._section.limits.request_timeout_s)

    async def _request_with_retries(
        self, path: str, body: Mapping[str, Any] | None, num_tokens: int, timeout_s: float | None
    ) -> Any:
        limits, failed_at = self._section.limits, list[str]()
        async with self._concurrency:
            for attempt in range(limits.max_retries + 1):
                await self._requests.take()
                await self._tokens.take(num_tokens)
                with self._replicas.lease(avoid=failed_at) as url:
                    try:
                        return await self._request_once(url + path, body, timeout_s)
                    except _RetryableError as error:
                        failed_at.append(url)
                        if attempt == limits.max_retries:
                            raise EndpointError(f"{error}, after {attempt + 1} attempts", error.status) from error
                        wait_s = error.wait_s
                logger.debug("%s did not answer, attempt %d", url, attempt + 1)
                backoff_s = limits.retry_backoff_s * 2**attempt if wait_s is None else wait_s
                await asyncio.sleep(min(backoff_s, MAX_BACKOFF_S))
        raise AssertionError("unreachable")

    def correct_token_estimate(self, num_tokens: int, *, estimated: int) -> None:
        """Correct the count of tokens by what the server says that a request took."""
        self._tokens.correct(num_tokens - estimated)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _request_once(self, url: str, body: Mapping[str, Any] | None, timeout_s: float | None) -> Any:
        method, given = ("GET", None) if body is None else ("POST", dict(body))
        asked = self._session().request(method, url, json=given, headers=trace_headers())
        try:
            async with asyncio.timeout(timeout_s), asked as response:
                text = await response.text()
        except TimeoutError as error:
            raise _RetryableError(f"{url}: no answer in {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _RetryableError(f"{url}: {type(error).__name__}: {error}") from error
        if response.status >= 500 or response.status in RETRYABLE_STATUSES:
            cause = f"{url}: {response.status} {text[:MAX_ERROR_TEXT_CHARACTERS]}"
            raise _RetryableError(cause, response.status, _retry_after(response))
        if response.status >= 400:
            is_too_long = response.status == TOO_LARGE or "context length" in text.lower()
            kind = ContextLengthExceeded if is_too_long else EndpointError
            raise kind(f"{url}: {response.status} {text[:MAX_ERROR_TEXT_CHARACTERS]}", response.status)
        try:
            return json.loads(text)
        except ValueError as error:
            raise EndpointError(f"{url}: no JSON: {text[:MAX_ERROR_TEXT_CHARACTERS]}", response.status) from error

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=self._section.limits.max_concurrency)
            no_limit = aiohttp.ClientTimeout(total=None)  # aiohttp's own would cut `request_timeout_s` above 300 s
            self._http = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=no_limit)
        return self._http


def _headers(section_key: str, api_key_env: str | None) -> dict[str, str]:
    if api_key_env is None:
        return {}
    key = os.environ.get(api_key_env)
    if not key:
        raise ConfigError(f"{section_key}.api_key_env", api_key_env, "this environment variable is not set")
    return {"Authorization": f"Bearer {key}"}


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    """Return the seconds of Retry-After (RFC 9110, 10.2.3); None for a date or no header."""
    try:
        return max(0.0, float(response.headers.get("Retry-After", "")))  # NaN: 0
    except ValueError:
        return None
