"""The model type ``kvferry`` of lm-evaluation-harness; see `kvferry.evaluate.harness`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from kvferry.errors import InvalidInput
from kvferry.evaluate.choices import EndScore, score_ends
from kvferry.evaluate.method import expand
from kvferry.evaluate.route import Route
from kvferry.hf.decode import continue_greedy
from kvferry.hf.geometry import context_length, text_config
from kvferry.hf.models import load_model
from kvferry.hf.restore import empty_cache
from kvferry.map.mapper import Mapper
from kvferry.snapshot import Snapshot
from kvferry.version import __version__

logger = logging.getLogger(__name__)

DEFAULT_LENGTH = 2048
"""Most tokens of a prompt and what follows it, where the model's configuration is silent."""

_IGNORED = ("batch_size", "max_batch_size")
"""What lm-eval gives to every model: caches are shipped one by one."""


class KVFerryLM(TemplateLM):
    """Scores and generates from caches that have gone over a `Route`.

    The cache of a request's context, all but its last token, is prefilled, shipped, mapped where a mapper is given, and
    taken up; the last token and what follows run on it. Ends that share a context share its cache. A context of one
    token has nothing to ship. Where lm-eval scores a whole text (``loglikelihood_rolling``), each window is cut in two:
    its second half is scored on the shipped cache of all before it.

    Args:
        pretrained: the model: a folder, a hub id or a built-in name.
        codec: policy of `kvferry.encode`; by default ``auto`` with a budget, else ``full``: bit-exact.
        budget: actual bytes over 16-bit bytes. A context too short for it takes the least that it can; the results say
            how many did, and what the budget came to.
        nominal_budget: the policy's own b instead.
        quantizers: what stands behind the policy's tiers, as ``kvferry ship sweep --quantizers`` takes it.
        scorer: what ranks tokens.
        mapper: folder of a mapper whose target is ``pretrained``.
        source: the model that the mapper maps from. [default: as the mapper calls it]
        native_prefix: first tokens that ``pretrained`` prefills itself, with a mapper.
        dtype: of weights and caches.
        attn: attention backend.
        device: where the models go; the CPU where lm-eval's default, a GPU, is not there.
        threads: of torch.
        max_length: most tokens of a prompt and what follows it.
        max_gen_toks: most tokens to generate where a task does not say.

    Raises:
        InvalidInput: an unknown or contradictory setting.
        ModelUnavailable, IncompatibleIdentity: as `kvferry.load_model` and `Route`.
    """

    def __init__(
        self,
        pretrained: str,
        codec: str | None = None,
        budget: float | None = None,
        nominal_budget: float | None = None,
        quantizers: str | None = None,
        scorer: str | None = None,
        mapper: str | None = None,
        source: str | None = None,
        native_prefix: int | None = None,
        dtype: str = "bfloat16",
        attn: str = "sdpa",
        device: str = "cpu",
        threads: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        **others: Any,
    ):
        super().__init__()
        if unknown := sorted(others.keys() - {*_IGNORED}):
            raise InvalidInput(f"model_args has no {', '.join(unknown)}: see kvferry.evaluate.harness_model.KVFerryLM")
        if source is not None and mapper is None:
            raise InvalidInput("a source is for a mapper: give both, or none")
        if budget is not None and nominal_budget is not None:
            raise InvalidInput("give budget or nominal_budget, not both")
        actual, nominal = ([] if one is None else [float(one)] for one in (budget, nominal_budget))
        codec = codec or ("auto" if actual or nominal else "full")
        (self._method,) = expand([codec], actual, quantizers=[quantizers], nominal_budgets=nominal, scorer=scorer)
        if threads is not None:
            torch.set_num_threads(threads)
        device = _present(device)
        self._model, self.tokenizer = load_model(pretrained, dtype=dtype, attn=attn, device=device)
        self._device = self._model.device
        mapped = None if mapper is None else Mapper.from_pretrained(mapper)
        origin = None
        if mapped is not None:
            origin, _ = load_model(source or mapped.source.model, dtype=dtype, attn=attn, device=device)
        self._route = Route(self._model, self._method, mapper=mapped, source=origin, native_prefix=native_prefix)
        longest = context_length(text_config(self._model)) or DEFAULT_LENGTH
        self.max_length = min(max_length or longest, longest)
        self.max_gen_toks = max_gen_toks

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's last token of a text. Raises `InvalidInput` where it has none."""
        return self._special("eos_token_id")

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context. Raises `InvalidInput` where the tokenizer has nothing for it."""
        return self._special("bos_token_id", "eos_token_id")

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation, by the tokenizer's own template."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokens of a text; the first token of a sequence is not added to a text that begins with it."""
        if add_special_tokens is None:
            start = self.tokenizer.bos_token
            add_special_tokens = not (start and string.startswith(start))
        ids: list[int] = self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False).input_ids
        return ids

    def get_model_info(self) -> dict[str, Any]:
        """What stands in lm-eval's results beside the scores: how caches were shipped, and what that cost."""
        mapper = self._route.mapper
        return {
            "kvferry": {
                "version": __version__,
                "method": self._method.to_json(),
                "mapper": None if mapper is None else mapper.digest,
                "source": None if mapper is None else mapper.source.model,
                **self._route.toll.to_json(),
            }
        }

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """See lm-eval; each window's second half is scored on the shipped cache of what is before it."""
        found = []
        for (text,) in tqdm([one.args for one in requests], disable=disable_tqdm, desc="texts"):
            ids = self.tok_encode(text, add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            found.append(sum(self._score_window(*make_disjoint_window(window)) for window in windows))
        for one, value in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", one.args, value)
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """See lm-eval; greedy only. Raises `InvalidInput` for a task that samples."""
        found = []
        for context, settings in tqdm([one.args for one in requests], disable=disable_tqdm, desc="texts"):
            given = normalize_gen_kwargs(settings, self.max_gen_toks)
            if given.get("do_sample"):
                raise InvalidInput("a task that samples: kvferry decodes greedily; give --gen_kwargs do_sample=False")
            text = self._generate(context, given["max_gen_toks"], [*filter(None, given.get("until", []))])
            self.cache_hook.add_partial("generate_until", (context, settings), text)
            found.append(text)
        return found

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **others: Any,  # noqa: ARG002
    ) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        together: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, end) in enumerate(requests):
            room = self.max_length + 1 - len(end)  # the last token of an end is not fed
            if not end or room < 1:
                raise InvalidInput(f"an end of {len(end)} tokens, where {self.max_length} is the longest sequence")
            together.setdefault(tuple(context[-room:]), []).append(index)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="ends") as bar:
            for shared, places in together.items():
                scores = self._score(shared, [requests[place][2] for place in places])
                for place, score in zip(places, scores, strict=True):
                    found[place] = (score.logprob, score.greedy)
                    self.cache_hook.add_partial("loglikelihood", requests[place][0], found[place])
                bar.update(len(places))
        return found

    def _special(self, *names: str) -> int:
        for name in names:
            if (token := getattr(self.tokenizer, name)) is not None:
                return int(token)
        raise InvalidInput(f"the tokenizer of {self.tokenizer.name_or_path} has no {' or '.join(names)}")

    def _score(self, context: Sequence[int], ends: Sequence[Sequence[int]]) -> list[EndScore]:
        ids = torch.tensor([context])
        return score_ends(self._model, self._cache(ids), ids, ends)

    def _cache(self, context: Tensor) -> Snapshot | None:
        """Of all tokens of a context but the last; ``None`` where that is none."""
        return self._route.cache(context[:, :-1]) if context.shape[1] > 1 else None

    def _score_window(self, context: list[int], predicted: list[int]) -> float:
        """Sum of log-probabilities of ``predicted`` after ``context``."""
        half = len(predicted) // 2
        parts: Iterable[tuple[list[int], list[int]]] = (
            [(context, predicted)]
            if half == 0
            else [(context, predicted[:half]), (context + predicted[:half], predicted[half:])]
        )
        return sum(self._score(before, [after])[0].logprob for before, after in parts)

    def _generate(self, context: str, longest: int, until: Sequence[str]) -> str:
        room = self.max_length - longest
        if room < 1:
            raise InvalidInput(f"{longest} tokens to generate, where {self.max_length} is the longest sequence")
        ids = torch.tensor([self.tok_encode(context)[-room:]])

        def text(tokens: Tensor) -> str:
            return str(self.tokenizer.decode(tokens[0], skip_special_tokens=True))

        def ended(tokens: Tensor) -> bool:
            return any(mark in text(tokens) for mark in until)

        cache = self._cache(ids)
        start = empty_cache(self._model) if cache is None else cache
        done = continue_greedy(self._model, start, ids, max_new_tokens=longest, stop=ended)
        told = text(done.token_ids)
        return told[: min((told.index(mark) for mark in until if mark in told), default=len(told))]


def _present(device: str) -> str:
    """``device``, or the CPU in place of a GPU that torch does not see: lm-eval asks for one unless told otherwise."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        logger.warning("torch sees no GPU: the models run on the CPU")
        return "cpu"
    return device
