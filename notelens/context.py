"""A prefilled prompt, and a store that prefills each prompt once."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from notelens.cache.kv import KVCache
from notelens.errors import SpanError
from notelens.models.base import NoteModel
from notelens.prompt import Prompt

DEFAULT_STORE_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Context:
    """A prompt and what its prefill left behind.

    Attributes:
        prompt: the prompt with its spans.
        cache: rows of all its tokens, the decision position included.
        hidden: final-norm output at the decision position, ``[d_model]``.
        residuals: anchor name to residual stream ``[n_layers + 1, d_model]`` for every anchor of the prompt.
    """

    prompt: Prompt
    cache: KVCache
    hidden: Float[Tensor, " d_model"]
    residuals: dict[str, Float[Tensor, "layers_and_embedding d_model"]]

    @property
    def nbytes(self) -> int:
        """Bytes of cache and residuals."""
        return self.cache.nbytes + sum(r.numel() * r.element_size() for r in self.residuals.values())

    def residual(self, anchor: str) -> Float[Tensor, "layers_and_embedding d_model"]:
        """Residual stream at an anchor.

        Raises:
            SpanError: the prompt has no such anchor.
        """
        if anchor not in self.residuals:
            raise SpanError(
                f"prompt {self.prompt.id!r} has no anchor {anchor!r}; it has {', '.join(sorted(self.residuals))}"
            )
        return self.residuals[anchor]


def prefill(model: NoteModel, prompt: Prompt) -> Context:
    """Run the whole prompt once. Cost: one forward pass."""
    names: Sequence[str] = sorted(prompt.anchors)
    out = model.prefill(prompt.token_ids, residuals_at=[prompt.anchors[a] for a in names])
    residuals = {} if out.residuals is None else {a: out.residuals[:, i] for i, a in enumerate(names)}
    return Context(prompt, out.cache, out.hidden, residuals)


class ContextStore:
    """Prefills prompts on demand and keeps the most recently used contexts within a byte budget.

    Probes that look at the same prompts share one prefill each. Contexts are values: reading one never changes it.

    Attributes:
        control: whether :meth:`donor` gives other rows than those of the prompt asked for, so that swaps may move nothing.

    Args:
        model: the model that runs the prompts.
        budget_bytes: contexts are dropped, least recently used first, when their rows exceed this.
    """

    control = False

    def __init__(self, model: NoteModel, budget_bytes: int = DEFAULT_STORE_BYTES) -> None:
        self.model = model
        self.budget_bytes = budget_bytes
        self.n_prefills = 0
        self.n_prefill_tokens = 0
        self._held: OrderedDict[tuple[int, ...], Context] = OrderedDict()
        self._bytes = 0

    def get(self, prompt: Prompt) -> Context:
        """The context of ``prompt``, prefilled now or earlier (matched by token ids and anchors)."""
        key = (*prompt.token_ids, -1, *(prompt.anchors[a] for a in sorted(prompt.anchors)))
        if key in self._held:
            self._held.move_to_end(key)
            held = self._held[key]
            return Context(prompt, held.cache, held.hidden, held.residuals)
        context = prefill(self.model, prompt)
        self.n_prefills += 1
        self.n_prefill_tokens += len(prompt)
        self._held[key] = context
        self._bytes += context.nbytes
        while self._bytes > self.budget_bytes and len(self._held) > 1:
            _, dropped = self._held.popitem(last=False)
            self._bytes -= dropped.nbytes
        return context

    def donor(self, recipient: Prompt, prompt: Prompt) -> KVCache:
        """The cache whose rows are put into the recipient's: that of ``prompt``.

        A control overrides this and sets ``control``, so that its donors go through the same probes as the real ones.
        """
        del recipient
        return self.get(prompt).cache
