"""Chat template child process: one JSON request a line in, the texts it asks for in a line out, until its input ends.

It imports nothing of Assay, so that it starts fast. The kernel bounds it: SIGPROF ends it after its CPU time, RLIMIT_AS
makes it fail to allocate.
"""

import functools
import json
import resource
import signal
import sys
from typing import Any

DAY: dict[str, str | None] = {"now": None}  # the moment that templates are told, if not this one


class OutputTooLong(Exception):
    pass


def main() -> None:
    limits = json.loads(sys.argv[1])
    sys.path[:] = limits["path"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory_bytes"], limits["memory_bytes"]))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        DAY["now"] = request["day"]
        answers = [within_time(request["template"], context, limits) for context in request["contexts"]]
        sys.stdout.buffer.write(json.dumps({"answers": answers}).encode() + b"\n")
        sys.stdout.buffer.flush()


def within_time(source: str, context: dict[str, Any], limits: dict[str, Any]) -> dict[str, str]:
    """Render within the time limit; each rendering has all of the CPU time to itself."""
    signal.setitimer(signal.ITIMER_PROF, limits["cpu_seconds"])
    answer = render(source, context, limits)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return answer


def render(source: str, context: dict[str, Any], limits: dict[str, Any]) -> dict[str, str]:
    """"failed" blames the conversation, "refused" the template."""
    from jinja2 import TemplateError, TemplateSyntaxError
    from jinja2.exceptions import SecurityError

    try:
        return {"text": bounded(compiled(source).generate(**context), limits["output_chars"])}
    except OutputTooLong:
        return {"refused": f"it writes more than {limits['output_chars']} characters"}
    except MemoryError:
        return {"refused": f"it needs more than {limits['memory_bytes'] // 2**20} MiB of memory"}
    except (TemplateSyntaxError, SecurityError, SyntaxError, RecursionError, OverflowError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    except TemplateError as error:  # raise_exception, or a field that the conversation lacks
        return {"failed": str(error)}
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def bounded(chunks: Any, limit: int) -> str:
    kept, length = [], 0
    for chunk in chunks:
        length += len(chunk)
        if length > limit:
            raise OutputTooLong
        kept.append(chunk)
    return "".join(kept)


@functools.lru_cache(maxsize=16)
def compiled(source: str) -> Any:
    return _environment().from_string(source)


@functools.cache
def _environment() -> Any:
    """The settings, filters and globals that templates written for transformers expect; nothing random."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                        extensions=[generation_tag(), "jinja2.ext.loopcontrols"])

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    env.filters["tojson"] = tojson
    env.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    env.globals.pop("lipsum")  # a conversation must render the same twice
    env.filters.pop("random")
    return env


def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
           sort_keys: bool = False) -> str:
    """jinja2's own escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(format: str) -> str:
    from datetime import datetime

    return (datetime.now() if DAY["now"] is None else datetime.fromisoformat(DAY["now"])).strftime(format)


def generation_tag() -> type:
    """{% generation %} marks what the assistant wrote; here its body just renders, in a scope of its own."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  (jinja2's protocol)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> str:
            return caller()

    return Generation


if __name__ == "__main__":
    main()
