"""Which reference pages there are, and what makes each."""

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.reference import commands, service, settings

REPOSITORY = Path(__file__).parents[2]
DIRECTORY = REPOSITORY / "docs" / "reference"

PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings.page,
    "metrics.md": service.metrics_page,
    "headers.md": service.headers_page,
    "routes.md": service.routes_page,
    "commands.md": commands.commands_page,
    "exit-codes.md": commands.exit_codes_page,
}
