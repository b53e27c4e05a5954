"""Versions of Python and of frameworks: accepted, tested and read. The adapters check the accepted versions.

python -m foremoe.supported     # prints the table of docs/users/adopting.md
"""

from __future__ import annotations

import dataclasses
import re

UNUSED = "–"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Framework:
    """One row of the table.

    routes, shadow and plans begin with run (by tests or lab/engines), read (only the sources), refused or –.

    Attributes:
        name: As its project spells it.
        package: Its distribution, whose version is checked. Empty: no version is checked.
        oldest: First accepted release.
        newest: Last accepted release, or series of releases such as (0, 19). None: no limit.
        refused_by: Where other versions raise an error. Empty: nowhere.
        tested: Versions that the tests use.
        sources: Revision whose sources were read.
        routes: Use of routes that the framework recorded.
        shadow: Shadow mode, which leaves execution unchanged.
        plans: Training under plans.
    """

    name: str
    package: str = ""
    oldest: tuple[int, ...] = ()
    newest: tuple[int, ...] | None = None
    refused_by: str = ""
    tested: tuple[str, ...] = ()
    sources: str = ""
    routes: str = UNUSED
    shadow: str = UNUSED
    plans: str = UNUSED

    @property
    def accepted(self) -> str:
        """Accepted versions in words, such as "0.16 to 0.19"."""
        first = _spelled(self.oldest)
        if self.newest is None:
            return f"{first} or newer"
        if len(self.newest) < len(self.oldest):
            return f"{first} or newer, below {_spelled(_following(self.newest))}"
        return first if self.newest == self.oldest else f"{first} to {_spelled(self.newest)}"

    @property
    def specifier(self) -> str:
        """Accepted versions as pip spells them, such as ">=0.16,<0.20"."""
        end = "" if self.newest is None else f",<{_spelled(_following(self.newest))}"
        return f">={_spelled(self.oldest)}{end}"

    def accepts(self, version: str) -> bool:
        """Returns whether a version such as "2.15.0+cpu" is accepted. Ignores everything after the release number."""
        found = re.match(r"\d+(\.\d+)*", version)
        release = tuple(map(int, found[0].split("."))) if found else ()
        padded = release + (0,) * (len(self.oldest) - len(release))
        return (
            bool(release)
            and padded >= self.oldest
            and (self.newest is None or padded[: len(self.newest)] <= self.newest)
        )

    def expect(self, adapter: str, version: str) -> None:
        """Raises ImportError, which names the adapter, unless the version is accepted."""
        if not self.accepts(version):
            raise ImportError(f"{adapter} needs {self.package} {self.accepted}, not {version}")

    def row(self) -> tuple[str, ...]:
        """Returns the cells below TITLES."""
        accepted = self.accepted if self.package else "not checked"
        tested = ", ".join(self.tested) or self.sources
        return self.name, accepted, self.refused_by or UNUSED, tested, self.routes, self.shadow, self.plans


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
    name="Megatron-LM (megatron-core)", package="megatron-core", oldest=(0, 16), newest=(0, 19), refused_by="`attach`",
    tested=("0.16.1", "0.19.2"), routes="run on its logs", shadow="run", plans="run",
)  # fmt: skip
VERL = Framework(
    name="verl", package="verl", oldest=(0, 9), newest=(0, 9), refused_by="`foremoe.verl`", tested=("0.9.1",),
    routes="run", shadow="run", plans="run",
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
        name="slime", sources="624b824, August 2026",
        routes="run in lab/engines", shadow="run in lab/engines", plans="run in lab/engines",
    ),
    Framework(
        name="miles", sources="31f1ca9, August 2026",
        routes="run in lab/engines", shadow="run in lab/engines", plans="run in lab/engines",
    ),
    Framework(
        name="NeMo-RL", sources="0.6.0, 7ea279a",
        routes="run with hand-made records", shadow="read; its wrapper run on Megatron-LM", plans="read",
    ),
    Framework(
        name="ms-swift", sources="4.6.0.dev0, 3602360",
        routes="run with hand-made responses of vLLM", shadow="read; its wrapper run on Megatron-LM", plans="read",
    ),
    Framework(name="OpenRLHF", sources="0.11.0, 3c3be62", routes="run with hand-made responses of vLLM"),
    Framework(name="torchtitan", sources="0.2.2, b5bcd76", plans="read: extension point"),
    VLLM,
    Framework(name="AReaL", sources="2.0.0, cbff54d", routes="read"),
)  # fmt: skip
TITLES = ("framework", "accepted", "others refused by", "tested or read", "recorded routes", "shadow", "plans")


def table() -> str:
    """Returns the table of all frameworks in Markdown."""
    rows = [TITLES, ("---",) * len(TITLES), *(framework.row() for framework in FRAMEWORKS)]
    return "\n".join("|" + "|".join(cell if cell == "---" else f" {cell} " for cell in row) + "|" for row in rows)


if __name__ == "__main__":
    print(table())
