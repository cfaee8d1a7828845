"""Answers from an OpenAI-compatible endpoint: the batched generator of ``regenerate`` for a target that runs elsewhere.

What a drafter learns is its target's tokens, so tokens are asked for wherever a server gives them: prompts are sent as
token ids, and answers taken as token ids. Of a server that gives text alone, an answer is taken only where the text has
one reading: its tokens spell the text in place, and there are as many as the server says it drew.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import httpx2
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dspark.decoding.request import GenerationCompletion, GenerationRequest
from dspark.training.data.chat import ChatTokenizer
from dspark.training.data.identity import EndpointIdentity

Api = Literal["completions", "chat"]
Dialect = Literal["vllm", "llama.cpp", "openai"]

# A model's own generation settings apply on many servers unless a request says otherwise, so everything is said.
_NEUTRAL = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_DIALECTS: dict[Dialect, Mapping[str, Any]] = {
    "vllm": {
        **_NEUTRAL,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    },
    "llama.cpp": {**_NEUTRAL, "top_k": 0, "repeat_penalty": 1.0},
    "openai": {},
}
_LARGEST_SEED = 2**31  # what every server takes
_TRANSIENT_STATUS = frozenset({408, 409, 425, 429})
_LONGEST_EXCERPT = 300

_T = TypeVar("_T")
_AnswerT = TypeVar("_AnswerT", bound="_Answer")


class EndpointError(OSError):
    """An endpoint that refuses what it is asked, or stays away: which URL, which status, what it said."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where to ask, and how.

    url: base URL, up to and including the version (``http://host:8000/v1``).
    model: the model's name there; None: the only one it has.
    api: ``completions`` sends token ids and works for every kind of prompt; ``chat`` sends messages, for servers that
        take nothing else, and cannot let the target write user messages.
    dialect: which fields besides OpenAI's own the server knows: ``vllm`` (also SGLang) and ``llama.cpp`` give token
        ids.
    api_key: sent as a bearer token; never written anywhere.
    """

    url: str
    model: str | None = None
    api: Api = "completions"
    dialect: Dialect = "vllm"
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the endpoint must be a URL like http://localhost:8000/v1, got {self.url!r}")
        if parts.username or parts.password or parts.query:
            raise ValueError(
                "the endpoint's URL must hold no user name, password or query; keys come from the environment"
            )
        # An HTTP header cannot hold anything else, and the error that says so would show the key.
        if self.api_key is not None and not re.fullmatch(r"[!-~]+", self.api_key):
            raise ValueError(
                "the key of the endpoint holds a space, a line break or a character outside ASCII; give the key alone"
            )


@dataclass(frozen=True, kw_only=True)
class Retries:
    """How long to put up with an endpoint that does not answer.

    attempts: tries of one request. first_wait_s, longest_wait_s: the wait between two, which doubles and is shortened
    by chance to between half and all of it; a server's ``Retry-After`` is honoured up to ``longest_retry_after_s``.
    timeout_s: for one answer, queueing on the server included. connect_timeout_s: for the connection.
    """

    attempts: int = 8
    first_wait_s: float = 0.5
    longest_wait_s: float = 60.0
    longest_retry_after_s: float = 600.0
    timeout_s: float = 600.0
    connect_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1, got {self.attempts}")
        for name in ("timeout_s", "connect_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def wait_s(self, failures: int, retry_after_s: float | None) -> float:
        """Seconds to wait after ``failures`` failures."""
        longest = min(self.longest_wait_s, self.first_wait_s * 2.0 ** min(failures - 1, 60))
        return max(random.uniform(longest / 2, longest), retry_after_s or 0.0)


class EndpointGenerator:
    """A ``BatchGenerate`` (see ``regeneration``) that asks an endpoint. Call ``connect`` first, then pass ``run``.

    Rows are as repeatable as the server is: every request carries its seed, but few servers promise the same tokens
    for it whatever else they are working on.

    Args:
        endpoint: where to ask.
        tokenizer: the target's.
        end_of_answer_id: token that ends an answer, for servers that leave it out of what they give.
        vocab_size: ids must be below it.
        max_concurrency: requests under way at the same time.
        on_wait: told when a request has to be tried again, and why.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        tokenizer: ChatTokenizer,
        end_of_answer_id: int,
        vocab_size: int,
        max_concurrency: int = 32,
        retries: Retries | None = None,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        if max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, got {max_concurrency}")
        self._endpoint = endpoint
        self._tokenizer = tokenizer
        self._end_of_answer_id = end_of_answer_id
        self._vocab_size = vocab_size
        self._max_concurrency = max_concurrency
        self._retries = retries or Retries()
        self._on_wait = on_wait
        self._base_url = endpoint.url.rstrip("/")
        self._model = endpoint.model
        #: Completions that came as text alone.
        self.from_text = 0

    def connect(self, *, max_length: int = 1) -> EndpointIdentity:
        """See that the endpoint is there and has the model; what to write into the manifest.

        Raises:
            EndpointError: it does not answer, or refuses to.
            ValueError: it has no such model, or one whose context is shorter than ``max_length`` tokens.
        """

        async def ask() -> _Models:
            async with self._client() as client:
                return await self._send(client, "GET", "models", None, _Models)

        models = asyncio.run(ask())
        names = ", ".join(model.id for model in models.data) or "none"
        if self._model is None:
            if len(models.data) != 1:
                raise ValueError(f"{self._base_url} has the models {names}: name one with --model")
            self._model = models.data[0].id
        found = [model for model in models.data if model.id == self._model]
        if not found:
            raise ValueError(f"{self._base_url} has no model {self._model}; it has {names}")
        context = found[0].max_model_len
        if context is not None and context < max_length:
            raise ValueError(
                f"--max-length is {max_length}, but {self._model} is served with a context of {context} tokens; give "
                f"at most {context}, or serve it with more"
            )
        return EndpointIdentity(api=self._endpoint.api, model=self._model, dialect=self._endpoint.dialect)

    def run(self, requests: Iterator[GenerationRequest | None]) -> Iterator[GenerationCompletion]:
        """Answer requests, ``max_concurrency`` at a time, each completion as soon as it is there.

        Raises:
            EndpointError: when a request was refused, or failed as often as ``retries`` allows. Everything that was
                finished by then has been yielded.
        """
        if self._model is None:
            raise RuntimeError("connect() comes before run()")
        running: set[asyncio.Task[GenerationCompletion]] = set()
        exhausted = False
        with asyncio.Runner() as runner:
            client = self._client()
            try:
                while True:
                    while not exhausted and len(running) < self._max_concurrency:
                        try:
                            request = next(requests)
                        except StopIteration:
                            exhausted = True
                            break
                        if request is None:
                            break
                        running.add(runner.get_loop().create_task(self._complete(client, request)))
                    if not running:
                        if exhausted:
                            return
                        continue
                    done, running = runner.run(_first_done(running))
                    failures = [error for task in done if (error := task.exception()) is not None]
                    for task in done:
                        if task.exception() is None:
                            yield task.result()
                    if failures:
                        raise failures[0]
            finally:
                runner.run(_stop(running, client))

    def _client(self) -> httpx2.AsyncClient:
        key = self._endpoint.api_key
        return httpx2.AsyncClient(
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx2.Timeout(self._retries.timeout_s, connect=self._retries.connect_timeout_s),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=self._max_concurrency),
        )

    async def _complete(self, client: httpx2.AsyncClient, request: GenerationRequest) -> GenerationCompletion:
        chat = self._endpoint.api == "chat"
        body = self._body(request)
        response = await self._send(client, "POST", "chat/completions" if chat else "completions", body, _Response)
        choice = response.choices[0]
        exact = self._check_prompt(request, response)
        ids, spelled_exactly = self._ids(request, response)
        if any(not 0 <= token < self._vocab_size for token in ids):
            raise EndpointError(
                f"{self._base_url} gave a token id outside the vocabulary of {self._vocab_size}: {self._model} there "
                "is not the model whose tokenizer --target names"
            )
        token_ids, reason = self._end(request, ids, choice)
        return GenerationCompletion(
            request_id=request.request_id,
            token_ids=token_ids,
            finish_reason=reason,
            exact=exact and spelled_exactly,
        )

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        settings, dialect = request.settings, self._endpoint.dialect
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            **_DIALECTS[dialect],
        }
        if settings.seed is not None:
            body["seed"] = settings.seed % _LARGEST_SEED
        if dialect == "vllm":
            body["stop_token_ids"] = sorted(request.stop_token_ids)
        if self._endpoint.api == "completions":
            body["prompt"] = list(request.prompt_ids)
            if dialect == "llama.cpp":
                body["logprobs"] = 1  # each has its token's id beside it
            return body
        if request.messages is None:
            raise ValueError(
                "the chat API cannot continue a user's message, so the target cannot write prompts through it; use "
                "--endpoint-api completions, or take prompts from a file"
            )
        body["messages"] = [{"role": role, "content": content} for role, content in request.messages]
        if dialect == "llama.cpp":
            body |= {"logprobs": True, "top_logprobs": 1}
        return body

    async def _send(
        self, client: httpx2.AsyncClient, method: str, path: str, body: Any, kind: type[_AnswerT]
    ) -> _AnswerT:
        """One request, tried again while what is wrong may pass."""
        url = f"{self._base_url}/{path}"
        for attempt in range(1, self._retries.attempts + 1):
            retry_after_s: float | None = None
            try:
                # The client's own limit is for each piece of an answer, and a server may send pieces for ever.
                async with asyncio.timeout(self._retries.timeout_s):
                    response = await client.request(method, url, json=body)
            except (httpx2.RequestError, TimeoutError) as error:
                what = _transport_problem(error, self._retries)
            except httpx2.InvalidURL as error:
                raise EndpointError(f"{url} is not a URL: {error}") from error
            else:
                what = f"answered {response.status_code}{self._said(response)}"
                if response.is_success:
                    try:
                        return kind.model_validate_json(response.content)
                    except ValidationError as error:
                        problem = error.errors()[0]
                        place = ".".join(map(str, problem["loc"]))
                        what = (
                            f"answered {response.status_code} with something that is no answer "
                            f"({place + ': ' if place else ''}{problem['msg']}){self._said(response)}"
                        )
                elif response.status_code not in _TRANSIENT_STATUS and response.status_code < 500:
                    raise EndpointError(f"{url} {what}. {_remedy(response.status_code)}")
                retry_after_s = _retry_after_s(response.headers.get("retry-after"))
            if retry_after_s is not None and retry_after_s > self._retries.longest_retry_after_s:
                raise EndpointError(
                    f"{url} {what} and wants to be left alone for {retry_after_s:.0f} s; what is finished is kept, and "
                    "the same command goes on then"
                )
            if attempt < self._retries.attempts:
                wait_s = self._retries.wait_s(attempt, retry_after_s)
                if self._on_wait is not None:
                    self._on_wait(
                        f"{url} {what}; trying again in {wait_s:.1f} s ({attempt} of {self._retries.attempts})"
                    )
                await asyncio.sleep(wait_s)
        raise EndpointError(
            f"{url} {what}, {self._retries.attempts} times in a row; what is finished is kept, and the same command "
            "goes on when the endpoint is there again"
        )

    def _said(self, response: httpx2.Response) -> str:
        """What the server said, in short, and without the key."""
        text = response.text
        try:
            error = response.json()
            for name in ("error", "message", "detail"):  # {"error": {"message": ...}}, and what other servers write
                error = error.get(name, error) if isinstance(error, dict) else error
            text = error if isinstance(error, str) else text
        except (ValueError, RecursionError):
            pass
        text = " ".join(text.split()).rstrip(".")
        if self._endpoint.api_key:
            text = text.replace(self._endpoint.api_key, "***")
        return f": {text[:_LONGEST_EXCERPT]}" if text else ""

    def _check_prompt(self, request: GenerationRequest, response: _Response) -> bool:
        """Whether the server read the prompt as it is in the row; ValueError when it never will."""
        read = response.choices[0].prompt_token_ids or response.prompt_token_ids
        if read is not None:
            same, count = tuple(read) == request.prompt_ids, len(read)
        elif response.usage is not None and response.usage.prompt_tokens is not None:
            count = response.usage.prompt_tokens
            same = count == len(request.prompt_ids)
        else:
            return True
        if same:
            return True
        if request.messages is not None and self._endpoint.api == "chat":
            if any(role == "assistant" for role, _ in request.messages):
                return False  # earlier answers, sent as text, were read as other tokens
            why = "its chat template is not the one of --target's tokenizer"
        else:
            why = "it adds tokens, or has another tokenizer than --target"
        raise ValueError(
            f"{self._base_url} read a prompt of {len(request.prompt_ids)} tokens as {count} other ones: {why}, so "
            "the rows would not be what the model saw"
        )

    def _ids(self, request: GenerationRequest, response: _Response) -> tuple[list[int], bool]:
        """Ids of the answer, and whether they are known to be the ones that the model drew."""
        choice = response.choices[0]
        if choice.token_ids is not None:
            return choice.token_ids, True
        if choice.logprobs is not None and (ids := choice.logprobs.ids()) is not None:
            return ids, True
        self.from_text += 1
        text = choice.text if choice.message is None else choice.message.content
        text = text or ""
        ids = [int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]]
        prompt = list(request.prompt_ids)
        # A replacement character stands for bytes that are no text, of which the text does not tell.
        in_place = "\ufffd" not in text and self._decode(prompt + ids) == self._decode(prompt) + text
        drawn = response.usage.completion_tokens if response.usage is not None else None
        # Servers differ in whether they count the token that ended the answer.
        counts = {len(ids), len(ids) + 1} if choice.finish_reason == "stop" else {len(ids)}
        return ids, in_place and (drawn is None or drawn in counts)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _end(self, request: GenerationRequest, ids: Sequence[int], choice: _Choice) -> tuple[tuple[int, ...], str]:
        """The ids up to and including the first stop token, which some servers leave out, and the finish reason.

        An answer is cut at the length that was asked for, which some servers do not keep.
        """
        for index, token in enumerate(ids[: request.max_tokens]):
            if token in request.stop_token_ids:
                return tuple(ids[: index + 1]), "stop"
        if choice.finish_reason in ("stop", "length") and len(ids) >= request.max_tokens:
            return tuple(ids[: request.max_tokens]), "length"
        if choice.finish_reason == "stop":
            named = choice.stop_reason
            if isinstance(named, int) and named in request.stop_token_ids:
                return (*ids, named), "stop"
            return (*ids, self._end_of_answer_id), "stop"
        if choice.finish_reason == "length" and ids:
            return tuple(ids), "length"
        raise EndpointError(
            f"{self._base_url} ended an answer of {len(ids)} tokens with finish_reason {choice.finish_reason!r}; "
            "`stop` and `length` can be used. What is finished is kept, and the same command tries again"
        )


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Model(_Answer):
    id: str
    max_model_len: int | None = None


class _Models(_Answer):
    data: tuple[_Model, ...]


class _Message(_Answer):
    content: str | None = None


class _TokenLogprob(_Answer):
    id: int | None = None


class _Logprobs(_Answer):
    content: tuple[_TokenLogprob, ...] | None = None

    def ids(self) -> list[int] | None:
        """Ids beside the log-probabilities, which llama.cpp gives; None where any lacks it."""
        found = [token.id for token in self.content or () if token.id is not None]
        return found if found and len(found) == len(self.content or ()) else None


class _Choice(_Answer):
    text: str | None = None
    message: _Message | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Usage(_Answer):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Response(_Answer):
    choices: tuple[_Choice, ...] = Field(min_length=1)
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None


async def _first_done(tasks: set[asyncio.Task[_T]]) -> tuple[set[asyncio.Task[_T]], set[asyncio.Task[_T]]]:
    return await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


async def _stop(tasks: set[asyncio.Task[Any]], client: httpx2.AsyncClient) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.aclose()


def _transport_problem(error: httpx2.RequestError | TimeoutError, retries: Retries) -> str:
    if isinstance(error, httpx2.ConnectTimeout):
        return f"could not be reached within {retries.connect_timeout_s:g} s"
    if isinstance(error, httpx2.TimeoutException | TimeoutError):
        return f"did not answer within {retries.timeout_s:g} s"
    if isinstance(error, httpx2.DecodingError):
        return f"sent what cannot be decompressed ({error})"
    return f"could not be reached ({error or type(error).__name__})"


def _remedy(status: int) -> str:
    if status in (401, 403):
        return "Name the environment variable that holds a valid key with --api-key-env"
    if status == 404:
        return (
            "The endpoint must be the base URL of the API, which mostly ends in /v1, and have this API (--endpoint-api)"
        )
    return (
        "If it does not know a field of the request, name its kind with --endpoint-dialect; if it takes no token ids "
        "as a prompt, ask it by --endpoint-api chat. What is finished is kept, and the same command goes on"
    )


def _retry_after_s(value: str | None) -> float | None:
    """Seconds of a ``Retry-After`` header, which is a number or a date; None when there is none that can be read."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None
