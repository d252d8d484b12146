"""The target model: frozen, evaluated by one function for training data and for decoding alike.

Tap k is the output of decoder block k (0-based, before any norm), -1 the embedding output; `final` is the state after
the last norm, so that `vocabulary.logits(final)` are the target's logits. Shape suffixes: B rows, Q positions of this
call, M cached positions, L taps, H hidden width.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from dspark.errors import InputError
from dspark.model.families import family_of, window
from dspark.model.vocabulary import Vocabulary
from dspark.packed import NAME, Packed, register_packed
from dspark.packed_decoder import PackedDecoder, plain
from dspark.sections import TargetSettings
from dspark.target_files import (
    DTYPES,
    default_device,
    fingerprint,
    load_config,
    load_pretrained,
    load_tokenizer,
    load_vocabulary,
    resolve,
    vocabulary_of,
)


class TargetStates(NamedTuple):
    """Concatenated taps [B, Q, L*H] in the order asked for, and normed last states [B, Q, H]."""

    taps: Tensor
    final: Tensor


class Target:
    """A target model in memory, frozen and in evaluation mode."""

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        revision: str,
        fingerprint: str,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        """`vocabulary` where the model does not hold its own: embedding or head are fetched for each forward."""
        register_packed()
        self.config: Any = model.config.get_text_config()
        self.family = family_of(model.config)
        self.window = window(self.config)
        self.model: Any = model.eval().requires_grad_(False)
        self.decoder: Any = model.get_submodule(self.family.decoder)
        self.tokenizer, self.name, self.revision, self.fingerprint = tokenizer, name, revision, fingerprint
        self.vocabulary = vocabulary or vocabulary_of(
            self.config,
            self.decoder.embed_tokens.weight.detach(),
            model.get_submodule(self.family.head).weight.detach(),
        )
        self.stop_ids = _stop_ids(model, tokenizer)

    @property
    def device(self) -> torch.device:
        """Where the head is, and the states that `states` returns."""
        return self.vocabulary.head_VH.device

    @property
    def computed_on(self) -> frozenset[str]:
        """The devices that its layers are computed on; more than one if a device map spreads them."""
        placed = {str(place) for place in getattr(self.model, "hf_device_map", {}).values()}
        # What is kept in memory or on disk is fetched to where the rest is.
        return frozenset(placed - {"cpu", "disk"}) or frozenset({str(self.device)})

    @property
    def dtype(self) -> torch.dtype:
        return self.vocabulary.head_VH.dtype

    @property
    def hidden(self) -> int:
        """Hidden width H."""
        return int(self.config.hidden_size)

    @property
    def layers(self) -> int:
        """Number of decoder blocks; valid taps are -1 .. layers-2."""
        return int(self.config.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        """V, rows of the head."""
        return int(self.vocabulary.head_VH.shape[0])

    @torch.inference_mode()
    def states(
        self,
        input_ids_BQ: Tensor,
        taps: Sequence[int],
        positions_BQ: Tensor | None = None,
        visible_B1QM: Tensor | None = None,
        cache: Cache | None = None,
        packed: Packed | None = None,
    ) -> TargetStates:
        """One forward without the head. Without `visible` attention is causal over these positions.

        Sliding layers see their window's part of `visible`; M counts positions from 0, or without a cache these tokens.
        Rows of unequal length are padded at the end; states of padding are meaningless and never read by real tokens.
        With `packed` B = 1, the tokens stand as it says, and rows, positions and what they see come from it.
        """
        if packed is not None and self.packed_decoder is not None:
            assert cache is not None, "packed tokens are computed into a cache"
            return self._packed_states(input_ids_BQ, taps, packed, cache, self.packed_decoder)
        if packed is not None:
            positions_BQ, visible_B1QM = packed.positions_N[None], packed.visible()
        held: dict[int, Tensor] = {}
        entry = self.vocabulary.embedding_VH.device
        input_ids_BQ = input_ids_BQ.to(entry)
        positions_BQ = None if positions_BQ is None else positions_BQ.to(entry)
        visible_B1QM = None if visible_B1QM is None else visible_B1QM.to(entry)
        hooks = [self._tap_source(tap).register_forward_hook(_keeper(held, tap)) for tap in set(taps)]
        try:
            with self._attention(packed):
                output = self.decoder(
                    input_ids=input_ids_BQ,
                    position_ids=positions_BQ,
                    attention_mask=self._masks(visible_B1QM, packed.positions_RQ if packed else positions_BQ, cache),
                    cache=cache,
                    use_cache=cache is not None,
                    **({"packed": packed} if packed else {}),
                )
        finally:
            for hook in hooks:
                hook.remove()
        final = output.last_hidden_state.to(self.device)
        joined = torch.cat([held[tap].to(self.device) for tap in taps], dim=-1) if taps else final[..., :0]
        return TargetStates(joined, final)

    @cached_property
    def decoding_vocabulary(self) -> Vocabulary:
        """The vocabulary for passes of a few rows."""
        return self.vocabulary.for_few_rows()

    @cached_property
    def packed_decoder(self) -> PackedDecoder | None:
        """The decoder for packed tokens; None: transformers' own computes them, since some layer is of another make."""
        fits = self.family.layers_alike and plain(self.decoder, self.device, self.dtype)
        return PackedDecoder(self.decoder) if fits else None

    def _packed_states(
        self, ids_1N: Tensor, taps: Sequence[int], packed: Packed, cache: Cache, decoder: PackedDecoder
    ) -> TargetStates:
        masks = self._masks(packed.visible(), packed.positions_RQ, cache)
        kinds = self.config.layer_types if isinstance(masks, dict) else ()
        visible = [masks[kind] for kind in kinds] or [masks] * self.layers
        held, final_NH = decoder(self.vocabulary.embed(ids_1N[0]), taps, packed, visible, cache)
        joined = torch.cat([held[tap] for tap in taps], dim=-1) if taps else final_NH[:, :0]
        return TargetStates(joined[None], final_NH[None])

    def _masks(self, visible_B1QM: Tensor | None, positions_BQ: Tensor | None, cache: Cache | None) -> Any:
        """What the decoder takes as attention mask: one for all layers, or one for each kind of layer."""
        if visible_B1QM is None or self.window is None:
            return visible_B1QM
        assert positions_BQ is not None, "a window needs the positions of the queries"
        cached = torch.arange(visible_B1QM.shape[-1], device=positions_BQ.device)
        columns = positions_BQ[:, None] if cache is None else cached
        near_B1QM = visible_B1QM & (columns > positions_BQ[..., None] - self.window).unsqueeze(1)
        if getattr(self.config, "layer_types", None) is None:
            return near_B1QM
        return {"full_attention": visible_B1QM, "sliding_attention": near_B1QM}

    @contextmanager
    def _attention(self, packed: Packed | None) -> Iterator[None]:
        """The attention of packed rows for the time of a pass; the decoder's layers read its name from its settings."""
        config, usual = self.decoder.config, self.decoder.config._attn_implementation
        if packed is not None:
            config._attn_implementation = NAME
        try:
            yield
        finally:
            config._attn_implementation = usual

    def _tap_source(self, tap: int) -> nn.Module:
        module: nn.Module = self.decoder.embed_tokens if tap == -1 else self.decoder.layers[tap]
        return module


def _keeper(held: dict[int, Tensor], tap: int) -> Any:
    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        held[tap] = output[0] if isinstance(output, tuple) else output

    return keep


def _stop_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that ends a text: the generation configuration's and the tokenizer's end tokens."""
    configs = (model.generation_config, model.config, model.config.get_text_config())
    named = [*(getattr(config, "eos_token_id", None) for config in configs), tokenizer.eos_token_id]
    flat = [token for ids in named for token in (ids if isinstance(ids, list) else [ids])]
    return frozenset(token for token in flat if token is not None)


def special_tokens(config: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that mean something beyond their text: the tokenizer's special tokens and whatever ends a text."""
    eos = config.eos_token_id
    added = [token for token, text in tokenizer.added_tokens_decoder.items() if text.special]
    named = [*tokenizer.all_special_ids, *added, *(eos if isinstance(eos, list) else [eos])]
    return frozenset(token for token in named if token is not None and token < config.vocab_size)


def load_target(settings: TargetSettings, device: torch.device | None = None) -> Target:
    """Loads a target, frozen, on `device` (default: CUDA where there is one), or as its device map deals it out.

    Raises:
        InputError: unsupported family, or files that cannot be loaded, or not onto these devices.
    """
    load_config(settings)
    transformers_logging.disable_progress_bar()
    dtype, place = DTYPES[settings.dtype], settings.device_map
    if place is None:
        model = load_pretrained(AutoModelForCausalLM, settings, dtype=dtype, attn_implementation="sdpa")
        model, vocabulary = model.to(device or default_device()), None
    else:
        model = load_pretrained(
            AutoModelForCausalLM, settings, dtype=dtype, attn_implementation="sdpa", device_map=place
        )
        _check_all_placed(model, place)
        vocabulary = _fetched_vocabulary(model, settings)
    mark = fingerprint(resolve(settings))
    return Target(model, load_tokenizer(settings), settings.model, settings.revision or "main", mark, vocabulary)


def _check_all_placed(model: Any, place: str | Mapping[str, int | str]) -> None:
    # transformers leaves what the map does not name wherever it was read to.
    names = [name for name, _ in model.named_parameters()]
    prefixes = tuple(f"{module}." if module else "" for module in place) if isinstance(place, Mapping) else ("",)
    if lost := next((name for name in names if name not in place and not name.startswith(prefixes)), None):
        raise InputError(
            f"target.device_map={place!r} says nothing of {lost}: name a module that holds it, or use device_map=auto"
        )


def _fetched_vocabulary(model: Any, settings: TargetSettings) -> Vocabulary | None:
    """Embedding and head of a model that keeps one of them off its device; None if it has both there."""
    family = family_of(model.config)
    weights = [model.get_submodule(name).weight for name in (f"{family.decoder}.embed_tokens", family.head)]
    if not any(weight.is_meta for weight in weights):
        return None
    places = [place for place in model.hf_device_map.values() if place not in ("cpu", "disk")]
    return load_vocabulary(settings, torch.device(places[0] if places else "cpu"), DTYPES[settings.dtype])


def check_one_device(settings: TargetSettings, gpus: float, booked: str) -> None:
    """Passes iff a process with `gpus` GPUs, the value of the setting `booked`, computes all layers on one of them.

    Raises:
        InputError: the device map spreads the layers, or names a GPU that the process does not have.
    """
    placed = settings.device_map
    numbers = {place for place in placed.values() if isinstance(place, int)} if isinstance(placed, dict) else set()
    if len(numbers) > 1 or max(numbers, default=-1) >= ceil(gpus) or (isinstance(placed, str) and gpus > 1):
        raise InputError(
            f"target.device_map={placed!r} with {booked}={gpus:g} does not put the target on one GPU that is there: "
            f"capture and training can do without, decoding keeps its keys and values on one. With device_map=auto and "
            f"{booked}=1 what does not fit waits in memory; vLLM and endpoints divide a target by themselves"
        )
