"""What the commands of the documents are run with in place of what stands there. Each row has its reason."""

import re
from typing import NamedTuple, Protocol


class Named(Protocol):
    """Asked only for what is needed: some of it has to be started first."""

    def __getitem__(self, name: str, /) -> str: ...


class Substitution(NamedTuple):
    pattern: str
    template: str
    """`\\1` is the match's, `{name}` the stage's."""


SUBSTITUTIONS = (
    # Where it is run: a clone whose environment is there already, and somebody's own port.
    Substitution(r"^make demo$", r"make -C {repository} --old-file=.venv/.complete demo PORT={port_8000}"),
    Substitution(r"^((?:\w+=\S+ )?\S*ropeway (?:up|serve)(?! .*--port )\b.*)", r"\1 --port {port_8000}"),
    Substitution(r"^(\S*ropeway worker (?:reference|simulated)(?! .*--port ).*)", r"\1 --port {port_8101}"),
    Substitution(r"^(\S*ropeway top)(?! http)", r"\1 {gateway}"),
    Substitution(r"^(ropeway loadtest(?! .*--url ).*)", r"\1 --url {gateway}"),
    Substitution(r"^(locust (?!.*--headless).*)", r"\1 --web-port {port_8089}"),
    Substitution(r"(http://|\b)(?:localhost|127\.0\.0\.1|gateway):8000\b", r"\g<1>127.0.0.1:{port_8000}"),
    Substitution(r"(?<=--port )(8101|8102|9000)\b", r"{port_\1}"),
    Substitution(r"(?<=127\.0\.0\.1:)(8101|8102)\b", r"{port_\1}"),
    Substitution(r"(?<=--transfer-port )(7101|7102)\b", r"{port_\1}"),
    Substitution(r"\b10\.0\.0\.7\b", "127.0.0.1"),
    # Engines, servers and models that the reader has.
    Substitution(r"http://(?:10\.0\.0\.1:800[01]|127\.0\.0\.1:8001)\b", "{worker_1}"),
    Substitution(r"http://(?:10\.0\.0\.2:800[01]|127\.0\.0\.1:8002)\b", "{worker_2}"),
    Substitution(r"(?<=--holder )worker-1\b|\bworker-1(?==http)", "{worker_1_name}"),
    Substitution(r"redis://(?:10\.0\.0\.9|127\.0\.0\.1)\b|unix:///var/lib/ropeway/valkey\.sock", "{redis}"),
    Substitution(r"/models/[\w-]+|(?<=smollm2=)DIR\b|\./smollm2\b", "{model_directory}"),
    Substitution(r"(?<=--model )llama(?!-)\b", "{model}"),
    # A capture hears the first worker; what is played is heard by a second capture, on an endpoint of their own.
    Substitution(r"^(ropeway events (?:replay|capture(?=.* --bind)).*tcp://127\.0\.0\.1:)5557\b", r"\g<1>{port_5557}"),
    Substitution(r"^(ropeway events replay .*--replay-endpoint tcp://127\.0\.0\.1:)5558\b", r"\g<1>{port_5558}"),
    Substitution(r"(?<=127\.0\.0\.1:)5557\b", "{events}"),
    Substitution(r"(?<=127\.0\.0\.1:)5558\b", "{events_again}"),
    # What the reader puts in himself.
    Substitution(r"(?<= revoke )3f9c0a81be42\b", "{key_id}"),
    Substitution(r"(?<= -d )\.\.\.$", "'{chat}'"),
    Substitution(r" \.\.\.(?= |$)", ""),
    Substitution(r"^curl ", r"curl --silent --show-error --max-time 60 --write-out '\\n%{{http_code}}' "),
    Substitution(r"&& systemctl reload ropeway$", ""),
    # The same for less: what takes minutes to say more exactly.
    Substitution(r"^ropeway quality --prompts 3$", "ropeway quality --prompts 1"),
    Substitution(r"^ropeway quality --documents handbook\.txt", r"\g<0> --prompts 1"),
    Substitution(r"^ropeway benchmark$", r"ropeway benchmark --rounds 1"),
    Substitution(r"(?<=--rounds )3\b", "1"),
    Substitution(r"--requests 200 --rate 2\b", "--requests 3 --rate 20"),
    Substitution(r"(?<=--duration )180\b", "9"),
    Substitution(r"(?<=--duration )60\b", "2"),
    Substitution(r"(?<=--seconds )60\b", "2"),
    Substitution(r"(?<= -t )1m\b", "5s"),
)


def substituted(text: str, stage: Named) -> str:
    for row in SUBSTITUTIONS:
        text = re.sub(row.pattern, lambda match, row=row: _filled(match, row.template, stage), text)
    return text


def _filled(match: re.Match[str], template: str, stage: Named) -> str:
    return match.expand(template).format_map(stage)
