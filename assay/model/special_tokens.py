"""Special tokens: BOS, EOS, stop ids and turn end, from tokenizer, config.json and generation_config.json together.

The files disagree often, and whoever picks one in silence gets a model that never stops; so disagreements are sentences.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import ArtifactError, DataError
from assay.model.tokenizer import Tokenizer
from assay.strict_json import read_json_if_there


@dataclass(frozen=True)
class SpecialTokens:
    bos: int | None
    eos: int | None  # the tokenizer's, or where it names none the first that another file names
    stop_ids: tuple[int, ...]  # every id that some file names as an end
    turn_end: int | None  # the special token with which the chat template closes the assistant's turn
    disagreements: tuple[str, ...]


def read_special_tokens(folder: Path | str, tokenizer: Tokenizer) -> SpecialTokens:
    config, generation = (read_json_if_there(Path(folder) / name) for name in ("config.json", "generation_config.json"))
    return resolve_special_tokens(tokenizer, config or {}, generation or {})


def resolve_special_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], generation: Mapping[str, Any]) -> SpecialTokens:
    """A file that is silent agrees; files that name ends of which none is common disagree.

    `stop_ids` is the union of what the files name. The template's end of turn is compared with it and not added to it:
    no other tool would stop there, so that must be seen, not repaired here alone.
    """
    problems = list(tokenizer.conflicts)
    ends = _named("eos", tokenizer, config, generation, problems)
    problems += _contradictions("ends", ends, tokenizer)
    stop_ids = tuple(sorted({id for ids in ends.values() for id in ids}))
    if not stop_ids:
        problems.append("no file names an end-of-sequence token: nothing would ever stop")
    turn_end = template_turn_end(tokenizer, problems)
    if turn_end is not None and turn_end not in stop_ids:
        problems.append(f"the chat template ends a turn with {_shown([turn_end], tokenizer)}, which is not a stop id "
                        f"({_shown(stop_ids, tokenizer)}): generations will run on")
    bos = _begin(tokenizer, config, generation, problems)
    eos = tokenizer.eos if tokenizer.eos is not None else next((id for ids in ends.values() for id in ids), None)
    return SpecialTokens(bos, eos, stop_ids, turn_end, tuple(problems))


def template_turn_end(tokenizer: Tokenizer, problems: list[str]) -> int | None:
    """The first special token after the assistant's words in a rendered turn; why there is none goes to `problems`."""
    if tokenizer.template is None:
        return None
    words = "assay-turn-end"
    try:
        text = tokenizer.render([{"role": "user", "content": "?"}, {"role": "assistant", "content": words}])
    except (DataError, ArtifactError) as error:
        problems.append(f"one user and one assistant turn cannot be rendered: {error}")
        return None
    _, found, tail = text.partition(words)
    specials = [id for id in tokenizer.encode(tail) if id in tokenizer.special_ids]
    if not found or not specials:
        problems.append("the chat template closes the assistant's turn with no special token: nothing marks its end")
        return None
    return specials[0]


def _begin(tokenizer: Tokenizer, config: Mapping[str, Any], generation: Mapping[str, Any],
           problems: list[str]) -> int | None:
    """The tokenizer's BOS; the other files decide only where tokenizer_config.json has no such field (null is one)."""
    wanted = tokenizer.settings.get("add_bos_token")
    if wanted is not None and wanted != (tokenizer.bos in tokenizer.encode("", special=True)):
        problems.append(f"tokenizer_config.json says add_bos_token {wanted}, tokenizer.json does the opposite")
    if tokenizer.bos is None and "bos_token" in tokenizer.settings:
        return None
    begins = _named("bos", tokenizer, config, generation, problems)
    problems += _contradictions("begins", begins, tokenizer)
    return next((id for ids in begins.values() for id in ids), None)


def _named(kind: str, tokenizer: Tokenizer, config: Mapping[str, Any], generation: Mapping[str, Any],
           problems: list[str]) -> dict[str, list[int]]:
    """File → the ids it names; an id without a token is a problem, and is left out."""
    own = tokenizer.bos if kind == "bos" else tokenizer.eos
    values = {"tokenizer_config.json": own, "config.json": config.get(f"{kind}_token_id"),
              "generation_config.json": generation.get(f"{kind}_token_id")}
    named: dict[str, list[int]] = {}
    for file, value in values.items():
        ids = value if isinstance(value, list) else [value]
        known = [id for id in ids if id in tokenizer.tokens]
        problems += [f"{file}: {kind}_token_id {id!r} is not an id of the tokenizer" for id in ids
                     if id is not None and id not in known]
        if known:
            named[file] = known
    return named


def _contradictions(verb: str, named: Mapping[str, list[int]], tokenizer: Tokenizer) -> list[str]:
    return [f"{one} {verb} with {_shown(named[one], tokenizer)}, {other} with {_shown(named[other], tokenizer)}"
            for one, other in itertools.combinations(named, 2) if not set(named[one]) & set(named[other])]


def _shown(ids: Iterable[int], tokenizer: Tokenizer) -> str:
    return " or ".join(f"{tokenizer.piece(id)!r} (id {id})" for id in ids) or "none"
