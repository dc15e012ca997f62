import math

from cachecore.kv.calibration import KL_BUDGETS, Calibration, calibrate, uncalibrated
from cachecore.kv.codecs.registry import CODECS


def test_a_codec_is_allowed_within_its_budget() -> None:
    measured = {"i8": 2e-4, "fp8": 3.1e-3, "i4h": 1.5e-2, "lm3h": 0.2}
    calibration = calibrate("m", 12, measured.__getitem__)
    assert calibration == Calibration("m", 12, measured)
    assert calibration.allowed == ("raw", "i8", "i4h")
    assert calibration.wire_codec == "i8"


def test_what_was_not_measured_is_not_allowed() -> None:
    assert uncalibrated("m").allowed == ("raw",)
    assert uncalibrated("m").wire_codec == "raw"
    assert not Calibration("m", 12, {"i8": math.nan}).allows("i8")
    assert not Calibration("m", 12, {"zip": 0.0}).allows("zip")


def test_budgets_may_be_tighter() -> None:
    calibration = calibrate("m", 12, lambda codec: 2e-4, {"i8": 1e-4, "i4h": 1e-3})
    assert calibration.allowed == ("raw", "i4h")
    assert calibration.wire_codec == "raw"


def test_every_lossy_codec_has_a_budget() -> None:
    assert {"raw", *KL_BUDGETS} == set(CODECS)
