"""assay completion: a shell's completion of verbs, options and their choices, as a script that the shell reads."""

import dataclasses
import importlib
import pkgutil
import typing
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import assay.verbs
from assay.config import argument


@dataclass(frozen=True)
class FLAGS:
    """Print a script with which a shell completes verbs, options and their choices. It is made from the verbs as they are installed;
    print it again after an upgrade."""

    shell: Literal["bash", "zsh", "fish"] = argument("shell to write the script for")


EXAMPLES = """  assay completion bash > ~/.local/share/bash-completion/completions/assay
  assay completion zsh > "${fpath[1]}/_assay"
  assay completion fish > ~/.config/fish/completions/assay.fish"""


class CompletedFlag(NamedTuple):
    name: str  # with its dashes
    help: str
    choices: tuple[str, ...]


def run(flags: FLAGS) -> int:
    print({"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[flags.shell](installed_verbs()))
    return 0


def installed_verbs() -> dict[str, str]:
    """Verb → what it does, from the first line of each verb's module: "assay NAME: what it does."."""
    modules = [importlib.import_module(f"assay.verbs.{found.name}") for found in pkgutil.iter_modules(assay.verbs.__path__)]
    firsts = [(module.__doc__ or "").partition("\n")[0] for module in modules]
    said = [line.removeprefix("assay ").partition(": ") for line in firsts if line.startswith("assay ")]
    return {verb: what.rstrip(".") for verb, _, what in said}


def verb_flags(verb: str) -> list[CompletedFlag]:
    cls = importlib.import_module(f"assay.verbs.{verb.replace('-', '_')}").FLAGS
    hints = typing.get_type_hints(cls)
    named = [field for field in dataclasses.fields(cls) if not field.metadata.get("positional") and not field.metadata.get("rest")]
    return [CompletedFlag(f"--{field.name.rstrip('_').replace('_', '-')}", field.metadata["help"], _choices(hints[field.name]))
            for field in named] + [CompletedFlag("--help", "show what it takes and exit", ())]


def positional_choices(verb: str) -> tuple[str, ...]:
    """Choices of a verb's first positional argument."""
    cls = importlib.import_module(f"assay.verbs.{verb.replace('-', '_')}").FLAGS
    first = next((field for field in dataclasses.fields(cls) if field.metadata.get("positional")), None)
    return () if first is None else _choices(typing.get_type_hints(cls)[first.name])


def _choices(hint: Any) -> tuple[str, ...]:
    """Choices in a type hint, wherever they stand: alone, in a tuple, or beside None."""
    if typing.get_origin(hint) is Literal:
        return tuple(map(str, typing.get_args(hint)))
    return next((found for part in typing.get_args(hint) if (found := _choices(part))), ())


def bash_script(verbs: dict[str, str]) -> str:
    cases = []
    for verb in verbs:
        flags = verb_flags(verb)
        after = " ".join(f"{verb}:{flag.name}) words='{' '.join(flag.choices)}';;" for flag in flags if flag.choices)
        plain = " ".join((*positional_choices(verb), *(flag.name for flag in flags)))
        cases.append(f"      {after} {verb}:*) words='{plain}';;")
    return f"""# assay completion bash
_assay() {{
  local now="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words
  if [ "$COMP_CWORD" -eq 1 ]; then
    words='{' '.join(verbs)}'
  else
    case "${{COMP_WORDS[1]}}:$before" in
{chr(10).join(cases)}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$now"))
}}
complete -o default -F _assay assay"""


def zsh_script(verbs: dict[str, str]) -> str:
    """Options with their help; files where nothing else is known."""
    cases = []
    for verb in verbs:
        specs = [f"'*{flag.name}[{_zsh(flag.help)}]" + (f":value:({' '.join(flag.choices)})'" if flag.choices else "'")
                 for flag in verb_flags(verb)]
        first = positional_choices(verb)
        specs.append(f"'1:what:({' '.join(first)})'" if first else "'*:file:_files'")
        cases.append(f"    {verb}) _arguments {' '.join(specs)};;")
    described = " ".join(f"'{verb}:{_zsh(what)}'" for verb, what in verbs.items())
    return f"""#compdef assay
_assay() {{
  local -a verbs=({described})
  if (( CURRENT == 2 )); then
    _describe verb verbs
    return
  fi
  local verb=$words[2]
  shift words
  (( CURRENT-- ))
  case $verb in
{chr(10).join(cases)}
  esac
}}
compdef _assay assay"""


def _zsh(text: str) -> str:
    return text.replace("'", "’").replace("[", "(").replace("]", ")").replace(":", " -").replace("\\", "")


def fish_script(verbs: dict[str, str]) -> str:
    lines = ["# assay completion fish"]
    lines += [f"complete -c assay -n __fish_use_subcommand -f -a {verb} -d {_fish(what)}" for verb, what in verbs.items()]
    for verb in verbs:
        seen = f"complete -c assay -n '__fish_seen_subcommand_from {verb}'"
        lines += [f"{seen} -l {flag.name[2:]} -d {_fish(flag.help)}" + (f" -x -a '{' '.join(flag.choices)}'" if flag.choices else "")
                  for flag in verb_flags(verb)]
        lines += [f"{seen} -a '{' '.join(first)}'"] if (first := positional_choices(verb)) else []
    return "\n".join(lines)


def _fish(text: str) -> str:
    return "'" + text.replace("\\", "").replace("'", "’") + "'"
