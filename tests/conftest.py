"""What holds for every test."""

import contextlib

with contextlib.suppress(ImportError):  # environments of single suites do without
    from hypothesis import settings

    # How long an example takes says how busy the machine is.
    settings.register_profile("ropeway", deadline=None)
    settings.load_profile("ropeway")
