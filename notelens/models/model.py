"""The runtime of a loaded model: plain transformers for prefill and decode, a bridge for hooks, one set of weights."""

import copy
import hashlib
import importlib.metadata
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from notelens.cache.hf import empty_cache, from_transformers, to_transformers
from notelens.cache.kv import KVCache
from notelens.errors import CacheError, MissingPackageError, NonFiniteError, UnsupportedModelError
from notelens.intervene.capture import residual_stream
from notelens.models.base import FamilySpec, Prefill
from notelens.models.gate import GateReport
from notelens.models.quant import Quantisation, plain_tensors

RECORDED_PACKAGES = ("torch", "transformers", "transformer-lens", "torchao", "numpy", "scikit-learn")


def library_versions() -> dict[str, str]:
    """Versions of what decides a number: Python and the numerical libraries; ``absent`` where not installed."""
    found = {"python": platform.python_version()}
    for name in RECORDED_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


class HFNoteModel:
    """A transformers causal language model behind the :class:`~notelens.models.base.NoteModel` protocol.

    Args:
        hf: the model, in evaluation mode; its parameters are never changed.
        tokenizer: its tokenizer.
        family: spec of its family.
        name: what records call it.
        revision: revision of the weights, or a hash of them when ``None``.
    """

    def __init__(self, hf: Any, tokenizer: Any, family: FamilySpec, *, name: str, revision: str | None = None) -> None:
        self._hf = hf
        self.tokenizer = tokenizer
        self._family = family
        self.name = name
        self.geometry = family.geometry(hf.config)
        self._revision = revision
        self.gate: GateReport | None = None
        self.ungated = False
        self.quantisation: Quantisation | None = None
        self.drift: dict[str, Any] | None = None

    @property
    def hf(self) -> Any:
        """The plain transformers model."""
        return self._hf

    @property
    def family(self) -> FamilySpec:
        """Spec of the model's family."""
        return self._family

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._hf.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters and of cached rows."""
        return self._hf.dtype

    @property
    def attention_kernel(self) -> str:
        """Attention implementation of the plain model."""
        return self._hf.config._attn_implementation

    @cached_property
    def weights_hash(self) -> str:
        """SHA-256 over the names and bytes of all parameters (about 1 s per GB)."""
        h = hashlib.sha256()
        for name, tensor in sorted(self._hf.state_dict().items()):
            for part in plain_tensors(tensor):
                h.update(f"{name} {tuple(part.shape)} {part.dtype}".encode())
                h.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return h.hexdigest()

    @property
    def revision(self) -> str:
        """Revision of the weights; their hash where none was given."""
        return self._revision or f"sha256:{self.weights_hash[:16]}"

    @cached_property
    def bridge(self) -> Any:
        """A ``TransformerBridge`` over a second module tree on the same parameter tensors.

        The copy shares every parameter and buffer, so it costs module objects only; the plain model keeps its own
        attention kernel.

        Raises:
            MissingPackageError: transformer-lens is not installed.
        """
        try:
            from transformer_lens.model_bridge import TransformerBridge
        except ImportError as e:
            raise MissingPackageError(
                "hooks need transformer-lens; install it with: pip install transformer-lens==4.3.0"
            ) from e
        shared = [*self._hf.parameters(), *self._hf.buffers()]
        twin = copy.deepcopy(self._hf, {id(t): t for t in shared})
        twin.config.architectures = [type(self._hf).__name__]  # models made in memory name none
        with tempfile.TemporaryDirectory() as folder:
            twin.config.save_pretrained(folder)
            # boot_transformers edits the tokenizer it is given, so it gets a copy
            tokenizer = copy.deepcopy(self.tokenizer)
            tokenizer.save_pretrained(folder)
            try:
                return TransformerBridge.boot_transformers(
                    folder, hf_model=twin, tokenizer=tokenizer, device=str(self.device), dtype=self.dtype
                )
            except (ImportError, ValueError, KeyError, AttributeError, TypeError, NotImplementedError) as e:
                raise UnsupportedModelError(
                    f"transformer-lens cannot wrap {self.name} ({type(e).__name__}: {e}); hooks are not available for it"
                ) from e

    @torch.no_grad()
    def prefill(
        self,
        token_ids: Sequence[int],
        past: KVCache | None = None,
        *,
        start: int | None = None,
        residuals_at: Sequence[int] = (),
    ) -> Prefill:
        """Run ``token_ids`` behind ``past`` (which stays unchanged). Cost: one forward over ``token_ids``.

        Args:
            token_ids: at least one id.
            past: rows to attend to; the new tokens stand behind its last position.
            start: absolute position of the first new token; behind the last cached row when ``None``.
            residuals_at: indices into ``token_ids`` at which the residual stream is kept.

        Raises:
            CacheError: no tokens, too many for the model, or a cache of another model.
            NonFiniteError: the output holds NaN or infinity.
        """
        follows = past.next_position if past is not None else 0
        start = follows if start is None else start
        if start < follows:
            raise CacheError(f"new tokens at position {start} would stand before the cached rows (up to {follows - 1})")
        if not token_ids:
            raise CacheError("nothing to run: step back one token and run it again to get its logits")
        if start + len(token_ids) > self.geometry.max_positions:
            why = f" ({self.geometry.limit})" if self.geometry.limit else ""
            raise CacheError(
                f"{start + len(token_ids)} tokens exceed the {self.geometry.max_positions} positions of {self.name}{why}"
            )
        if past is not None:
            self._check_past(past)
        store = (
            to_transformers(past, share=True)
            if past is not None and len(past)
            else empty_cache(self.geometry.n_layers if self._family.recurrent else 0)
        )
        ids = torch.tensor([list(token_ids)], device=self.device)
        positions = torch.arange(start, start + len(token_ids), device=self.device)
        with residual_stream(self._family.layers(self._hf), list(residuals_at)) as found:
            out = self._family.decoder(self._hf)(
                input_ids=ids, position_ids=positions[None], past_key_values=store, use_cache=True
            )
        hidden = out.last_hidden_state[0, -1]
        if not bool(torch.isfinite(hidden).all()):
            raise NonFiniteError(f"{self.name}: the output behind {len(token_ids)} tokens is not finite ({self.dtype})")
        before = past.token_ids if past is not None else ()
        cache = from_transformers(store, (*before, *token_ids))
        all_positions = torch.cat([past.positions, positions.cpu()]) if past is not None else positions.cpu()
        history = past.history if past is not None else ()
        if start > follows:
            history = (*history, f"tokens at {start}.. behind a gap of {start - follows}")
        states = cache.states if past is None else {**past.states, **cache.states}
        cache = KVCache(cache.keys, cache.values, all_positions, cache.token_ids, history, states)
        return Prefill(cache, hidden.detach(), torch.stack(found) if residuals_at else None)

    def _check_past(self, past: KVCache) -> None:
        self.geometry.check(past, self.name)
        if past.dtype != self.dtype or past.device.type != self.device.type:
            raise CacheError(
                f"the cache is {past.dtype} on {past.device}, {self.name} is {self.dtype} on {self.device}; use a cache of "
                "this model"
            )
        if self._family.recurrent and len(past) and len(past) not in past.states:
            raise CacheError(
                f"{self.name} also keeps a recurrent state, and the cache has none behind its {len(past)} rows: rows were "
                "moved, cut or joined, and a state cannot be. notelens.intervene.rescan.rescan(model, cache) computes it "
                "again, at the cost of running all its tokens"
            )

    def answer_logits(self, hidden: Float[Tensor, "*batch d_model"], answer_ids: Sequence[int]) -> Tensor:
        """Logits of ``answer_ids`` ``[*batch, answer]``; only those rows of the unembedding are computed."""
        head = self._family.unembedding(self._hf)
        rows = torch.tensor(list(answer_ids), device=head.weight.device)
        bias = head.bias[rows] if head.bias is not None else None
        logits = torch.nn.functional.linear(hidden, head.weight[rows], bias).float()
        return self._scale(logits)

    @torch.no_grad()
    def next_logits(self, hidden: Float[Tensor, "*batch d_model"]) -> Tensor:
        """Logits of the whole vocabulary ``[*batch, vocab]``."""
        return self._scale(self._family.unembedding(self._hf)(hidden).float())

    def _scale(self, logits: Tensor) -> Tensor:
        config = self._family.text_config(self._hf.config)
        cap, factor = self._family.final_softcap(config), self._family.logit_scale(config)
        logits = logits if factor == 1.0 else logits * factor
        return torch.tanh(logits / cap) * cap if cap is not None else logits

    @torch.no_grad()
    def lens_logits(self, residual: Float[Tensor, "*batch d_model"], answer_ids: Sequence[int]) -> Tensor:
        """Logit lens: ``answer_ids`` read from a residual stream through the final norm."""
        return self.answer_logits(self._family.final_norm(self._hf)(residual), answer_ids)

    def facts(self) -> dict[str, Any]:
        """What a record says about the model."""
        return {
            "name": self.name,
            "model_type": self._hf.config.model_type,
            "revision": self.revision,
            "weights_hash": self.weights_hash,
            "n_parameters": sum(p.numel() for p in self._hf.parameters()),
            "n_layers": self.geometry.n_layers,
            "dtype": str(self.dtype).removeprefix("torch."),
            "attention_kernel": self.attention_kernel,
            "device": self.device.type,
            "versions": library_versions(),
            "gate": self.gate.as_json() if self.gate is not None else None,
            "ungated": self.ungated,
            "quantisation": asdict(self.quantisation) if self.quantisation is not None else None,
            "drift": self.drift,
        }
