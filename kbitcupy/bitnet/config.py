"""What a BitNet layer is made with: a frozen configuration, JSON both ways."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import FormatError

__all__ = ["BitNetAdapterConfig", "BitNetConfig"]

#: The projections of a decoder's layer, by the names that most checkpoints give them.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class BitNetConfig:
    """How a layer quantizes its weights and activations; checked when it is made.

    Parameters
    ----------
    group_size : int, default 64
        Neighbours along a row of weights that share a scale: a power of two.
    activation_bits : int, default 8
        Bits of an activation, 2 to 8.
    per_token_activation : bool, default True
        Whether every token has a scale of its own, or all share one.
    use_rms_norm : bool, default True
        Whether an RMSNorm without weights comes before activations are quantized.
    eps : float, default 1e-5
        What the norm adds to the mean of the squares; above 0.
    enable_ste : bool, default True
        Whether a layer has gradients, straight through the rounding; one for inference has none.

    Raises
    ------
    FormatError
        When a value is not allowed.

    Examples
    --------
    >>> import kbitcupy as kb
    >>> config = kb.bitnet.BitNetConfig.inference().with_group_size(128)
    >>> config.enable_ste, config.group_size
    (False, 128)
    >>> kb.bitnet.BitNetConfig.from_json(config.to_json()) == config
    True
    """

    group_size: int = 64
    activation_bits: int = 8
    per_token_activation: bool = True
    use_rms_norm: bool = True
    eps: float = 1e-5
    enable_ste: bool = True

    def __post_init__(self) -> None:
        size = self.group_size
        if type(size) is not int or size < 1 or size & (size - 1):
            raise FormatError(f"group_size is {size!r}; it must be a power of two, such as 64")
        if type(self.activation_bits) is not int or not 2 <= self.activation_bits <= 8:
            raise FormatError(f"activation_bits is {self.activation_bits!r}; allowed are 2 to 8")
        for name in ("per_token_activation", "use_rms_norm", "enable_ste"):
            if not isinstance(getattr(self, name), bool):
                raise FormatError(f"{name} is {getattr(self, name)!r}; allowed are True and False")
        number = isinstance(self.eps, (int, float)) and not isinstance(self.eps, bool)
        if not number or not 0 < self.eps <= float(np.finfo(np.float32).max):
            raise FormatError(f"eps is {self.eps!r}; it must be a number above 0 and finite in float32, such as 1e-5")

    @classmethod
    def training(cls) -> BitNetConfig:
        """The defaults, with gradients."""
        return cls(enable_ste=True)

    @classmethod
    def inference(cls) -> BitNetConfig:
        """The defaults, without gradients."""
        return cls(enable_ste=False)

    def with_group_size(self, group_size: int) -> BitNetConfig:
        """The same with another `group_size`."""
        return dataclasses.replace(self, group_size=group_size)

    def with_activation_bits(self, activation_bits: int) -> BitNetConfig:
        """The same with other `activation_bits`."""
        return dataclasses.replace(self, activation_bits=activation_bits)

    def with_per_token_activation(self, per_token_activation: bool) -> BitNetConfig:
        """The same with another `per_token_activation`."""
        return dataclasses.replace(self, per_token_activation=per_token_activation)

    def with_rms_norm(self, use_rms_norm: bool) -> BitNetConfig:
        """The same with another `use_rms_norm`."""
        return dataclasses.replace(self, use_rms_norm=use_rms_norm)

    def with_eps(self, eps: float) -> BitNetConfig:
        """The same with another `eps`."""
        return dataclasses.replace(self, eps=eps)

    def with_ste(self, enable_ste: bool) -> BitNetConfig:
        """The same with another `enable_ste`."""
        return dataclasses.replace(self, enable_ste=enable_ste)

    def to_dict(self) -> dict[str, Any]:
        """The options by name, as JSON has them; `from_dict` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> BitNetConfig:
        """The configuration with these options; those that are missing have their defaults.

        Raises
        ------
        FormatError
            When an option is not known or its value not allowed.
        """
        return cls(**_known(cls, options))

    def to_json(self) -> str:
        """The options as a JSON object; `from_json` is the inverse."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> BitNetConfig:
        """The configuration of such a JSON object.

        Raises
        ------
        FormatError
            When it is no JSON object, an option is not known, or its value not allowed.
        """
        return cls.from_dict(_object(text))


@dataclasses.dataclass(frozen=True)
class BitNetAdapterConfig:
    """Which modules of a model get a `BitNetAdapter`, and how its layers quantize.

    Parameters
    ----------
    bitnet : BitNetConfig, optional
        How layers quantize.
    target_modules : sequence of str
        Last parts of the modules' names; by default the projections of attention and of the feed-forward network.

    Raises
    ------
    FormatError, TypeError
        When a value is not allowed.

    Examples
    --------
    >>> import kbitcupy as kb
    >>> config = kb.bitnet.BitNetAdapterConfig().with_target_modules(["q_proj", "v_proj"])
    >>> config.matches("model.layers.0.self_attn.q_proj"), config.matches("lm_head")
    (True, False)
    """

    bitnet: BitNetConfig = BitNetConfig()
    target_modules: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        if not isinstance(self.bitnet, BitNetConfig):
            raise TypeError(f"bitnet is {type(self.bitnet).__name__}; it must be a BitNetConfig")
        names = self.target_modules
        if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
            raise FormatError(f"target_modules is {names!r}; it must be a list of names, such as ['q_proj', 'v_proj']")
        object.__setattr__(self, "target_modules", tuple(names))

    def with_target_modules(self, target_modules: Any) -> BitNetAdapterConfig:
        """The same with other `target_modules`."""
        return dataclasses.replace(self, target_modules=target_modules)

    def matches(self, module: str) -> bool:
        """Whether a module of this name gets an adapter: one of `target_modules` is the last part of it."""
        return any(module == name or module.endswith(f".{name}") for name in self.target_modules)

    def to_json(self) -> str:
        """The options as a JSON object; `from_json` is the inverse."""
        return json.dumps({"bitnet": self.bitnet.to_dict(), "target_modules": list(self.target_modules)})

    @classmethod
    def from_json(cls, text: str) -> BitNetAdapterConfig:
        """The configuration of such a JSON object.

        Raises
        ------
        FormatError
            When it is no JSON object, an option is not known, or its value not allowed.
        """
        options = _known(cls, _object(text))
        if "bitnet" in options:
            options["bitnet"] = BitNetConfig.from_dict(options["bitnet"])
        return cls(**options)


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise FormatError(f"the configuration is no JSON: {error}") from None


def _known(kind: type, options: Any) -> dict[str, Any]:
    """The options of a configuration, of which each is known."""
    if not isinstance(options, Mapping):
        raise FormatError(f"the configuration is {type(options).__name__}; it must be an object of options by name")
    names = [field.name for field in dataclasses.fields(kind)]
    for name in options:
        if name not in names:
            raise FormatError(f"{name!r} is no option of {kind.__name__}; it has {', '.join(names)}")
    return dict(options)
