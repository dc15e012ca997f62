"""Multipart forms, as far as an upload needs them: a few fields, one file, all in memory."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from gateway.errors import BadRequest

_boundary = re.compile(r'boundary=(?:"([^"]{1,200})"|([^\s;]{1,200}))', re.IGNORECASE).search
_name = re.compile(rb'[; ]name="([^"\r\n]*)"', re.IGNORECASE).search
_filename = re.compile(rb'[; ]filename="([^"\r\n]*)"', re.IGNORECASE).search
PARTS_MAX = 64


class Part(NamedTuple):
    content: bytes
    filename: str = ""


def read_form(content_type: str, body: bytes) -> Mapping[str, Part]:
    """The parts of a form by their names. Raises BadRequest."""
    found = _boundary(content_type) if content_type.lower().startswith("multipart/form-data") else None
    if found is None:
        raise BadRequest("A form is expected: multipart/form-data with a boundary.")
    delimiter = b"\r\n--" + (found[1] or found[2]).encode("latin-1")
    sections = (b"\r\n" + body).split(delimiter, PARTS_MAX)
    if len(sections) < 3 or not sections[-1].startswith(b"--"):
        raise BadRequest("The form has no end.")
    parts: dict[str, Part] = {}
    for section in sections[1:-1]:
        head, separator, content = section.partition(b"\r\n\r\n")
        name = _name(head)
        if not separator or name is None:
            raise BadRequest("A part of the form has no name.")
        filename = _filename(head)
        parts[name[1].decode("utf-8", "replace")] = Part(
            content, filename[1].decode("utf-8", "replace") if filename else ""
        )
    return parts
