"""Pages that are made from code are current."""

from benchmarks.write_settings import PAGE, settings_page


def test_the_settings_reference_is_what_the_types_say() -> None:
    assert PAGE.read_text() == settings_page(), "run `make settings`"
