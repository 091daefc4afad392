"""The base of all values that cross the boundary of the program."""

from pydantic import BaseModel, ConfigDict


class Value(BaseModel):
    """A frozen value that takes no unknown field and documents each with the text under it."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        json_schema_serialization_defaults_required=True,
    )
