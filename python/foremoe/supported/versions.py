"""Versions of Python and of frameworks: accepted, tested and read. The adapters check the accepted versions."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re

UNUSED = "–"
_log = logging.getLogger("foremoe")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Framework:
    """One row of the table.

    routes, shadow and plans begin with run (by tests or lab/engines), read (only the sources), refused or –.

    Attributes:
        name: As its project spells it.
        package: Its distribution, whose version is checked. Empty: no version is checked.
        oldest: First accepted release.
        newest: Last accepted release, or series of releases such as (0, 19). None: no limit. Shadow mode, which changes
            no results, accepts newer releases with a warning.
        oldest_in_shadow: First release accepted in shadow mode. Empty: oldest.
        refused_by: Where other versions raise an error. Empty: nowhere.
        tested: Versions that CI installs for the tests.
        trees: Versions whose source trees passed the tests, by `scripts/test frameworks TREE`.
        sources: Revisions whose sources were read. Without a package, active mode accepts these.
        routes: Use of routes that the framework recorded.
        shadow: Shadow mode, which leaves execution unchanged.
        plans: Training under plans.
    """

    name: str
    package: str = ""
    oldest: tuple[int, ...] = ()
    newest: tuple[int, ...] | None = None
    oldest_in_shadow: tuple[int, ...] = ()
    refused_by: str = ""
    tested: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()
    sources: str = ""
    routes: str = UNUSED
    shadow: str = UNUSED
    plans: str = UNUSED

    @property
    def accepted(self) -> str:
        """Accepted versions in words, such as "0.16 to 0.20"."""
        return self.accepted_in("active")

    def accepted_in(self, mode: str) -> str:
        """Accepted versions in words. mode: see accepts()."""
        oldest, newest = self._range(mode)
        if newest is None:
            return f"{_spelled(oldest)} or newer"
        if len(newest) < len(oldest):
            return f"{_spelled(oldest)} or newer, below {_spelled(_following(newest))}"
        return _spelled(oldest) if newest == oldest else f"{_spelled(oldest)} to {_spelled(newest)}"

    @property
    def specifier(self) -> str:
        """Accepted versions as pip spells them, such as ">=0.16,<0.20"."""
        end = "" if self.newest is None else f",<{_spelled(_following(self.newest))}"
        return f">={_spelled(self.oldest)}{end}"

    def accepts(self, version: str, mode: str = "active") -> bool:
        """Returns whether a version such as "2.15.0+cpu" is accepted. Ignores everything after the release number.

        mode: "active", or "shadow", which accepts all newer versions.
        """
        oldest, newest = self._range(mode)
        release = _release(version)
        padded = release + (0,) * (len(oldest) - len(release))
        return bool(release) and padded >= oldest and (newest is None or padded[: len(newest)] <= newest)

    def expect(self, adapter: str, version: str, mode: str = "active") -> None:
        """Raises ImportError, which names the adapter, unless accepts(version, mode).

        Logs a warning, once per process, for a version that only shadow mode accepts because it is newer.
        """
        if not self.accepts(version, mode):
            of_mode = " in mode shadow" if mode == "shadow" else ""
            raise ImportError(f"{adapter} needs {self.package} {self.accepted_in(mode)}{of_mode}, not {version}")
        if self.newest is not None and _release(version)[: len(self.newest)] > self.newest:
            _warn_once(f"{adapter} was tested with {self.package} {self.accepted}, not with {version}")

    def _range(self, mode: str) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        return (self.oldest_in_shadow or self.oldest, None) if mode == "shadow" else (self.oldest, self.newest)

    def row(self) -> tuple[str, ...]:
        """Returns the cells below TITLES."""
        accepted = self.accepted if self.package else "not checked"
        if self.package and self.newest and self.shadow != UNUSED:
            accepted += f"; shadow: {self.accepted_in('shadow')}"
        tested = ", ".join(sorted((*self.tested, *self.trees), key=_release)) or self.sources
        return self.name, accepted, self.refused_by or UNUSED, tested, self.routes, self.shadow, self.plans


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning("%s", message)


def _spelled(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _following(release: tuple[int, ...]) -> tuple[int, ...]:
    return (*release[:-1], release[-1] + 1)


PYTHON = Framework(name="Python", package="python", oldest=(3, 11), refused_by="pip", tested=("3.11", "3.12"))
TORCH = Framework(
    name="PyTorch", package="torch", oldest=(2, 9, 1), refused_by="`foremoe.torch`", tested=("2.15.0",), plans="run"
)
TRANSFORMERS = Framework(
    name="transformers", package="transformers", oldest=(5, 0), refused_by="`foremoe.hf`", tested=("5.23.0",),
    routes="run", plans="run",
)  # fmt: skip
TRANSFORMERS_LOADING_PARTS = dataclasses.replace(TRANSFORMERS, oldest=(5, 23))
"""transformers whose expert parallelism accepts implementations of others, so that ranks can load parts of a model."""
TRL = Framework(
    name="trl", package="trl", oldest=(1, 16), newest=(1,), refused_by="`foremoe.trl`", tested=("1.16.0",),
    routes="run", plans="run",
)  # fmt: skip
MEGATRON = Framework(
    name="Megatron-LM (megatron-core)", package="megatron-core", oldest=(0, 16), newest=(0, 20), refused_by="`attach`",
    tested=("0.16.1", "0.19.2"), trees=("0.16.0rc0", "0.17.0", "0.18.0", "0.19.0", "0.20.0"),
    routes="run on its logs", shadow="run", plans="run",
)  # fmt: skip
VERL = Framework(
    name="verl", package="verl", oldest=(0, 8), newest=(0, 10), oldest_in_shadow=(0, 7, 1), refused_by="`foremoe.verl`",
    tested=("0.9.1",), trees=("0.8.0", "0.10.0.dev"), routes="run", shadow="run", plans="run",
)  # fmt: skip
VLLM_OF_TRL = Framework(
    name="vLLM in trl", package="vllm", oldest=(0, 26), newest=(0, 31), refused_by="`foremoe.trl`", tested=("0.29.0",),
    routes="run in lab/engines", plans="run in lab/engines",
)  # fmt: skip
VLLM = Framework(
    name="vLLM's EPLB", package="vllm", oldest=(0, 14), newest=(0, 33), refused_by="`foremoe.eplb.vllm_policy`",
    sources="0.14.0, 0.18.1, 0.23.0, 0.33.0", plans="run in lab/engines",
)  # fmt: skip
FRAMEWORKS = (
    PYTHON,
    TORCH,
    TRANSFORMERS,
    TRL,
    VLLM_OF_TRL,
    MEGATRON,
    VERL,
    Framework(
        name="slime", sources="624b824",
        routes="run in lab/engines", shadow="run in lab/engines", plans="run in lab/engines",
    ),
    Framework(name="miles", sources="31f1ca9", shadow="run in lab/engines", plans="run in lab/engines"),
    Framework(
        name="NeMo-RL", sources="7ea279a", routes="run with hand-made records",
        shadow="run in lab/engines", plans="run in lab/engines",
    ),
    Framework(name="SkyRL", sources="a956457", shadow="run in lab/engines", plans="run in lab/engines"),
    Framework(name="ROLL", sources="8eb27cc", shadow="run in lab/engines", plans="run in lab/engines"),
    Framework(
        name="ms-swift", sources="4.6.0.dev0, 3602360", routes="run with hand-made responses of vLLM",
        shadow="run in lab/engines", plans="run in lab/engines",
    ),
    Framework(name="AReaL", sources="1.0.4, 4aef98d; 2.0.0, cbff54d", routes="read", shadow="run in lab/engines"),
    Framework(name="RLinf", sources="a3816b5", shadow="run in lab/engines"),
    Framework(name="prime-rl", sources="559b447"),
    Framework(name="OpenRLHF", sources="0.11.0, 3c3be62", routes="run with hand-made responses of vLLM"),
    Framework(name="torchtitan", sources="0.2.2, b5bcd76", plans="read: extension point"),
    VLLM,
)  # fmt: skip
TITLES = ("framework", "accepted", "others refused by", "tested or read", "recorded routes", "shadow", "plans")


def table() -> str:
    """Returns the table of all frameworks in Markdown."""
    rows = [TITLES, ("---",) * len(TITLES), *(framework.row() for framework in FRAMEWORKS)]
    return "\n".join("|" + "|".join(cell if cell == "---" else f" {cell} " for cell in row) + "|" for row in rows)
