from __future__ import annotations

import onnx
import pytest

from onnxfit.load.wire import field_key, fields, varint


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**31, 2**63 - 1])
def test_numbers_are_written_as_protobuf_writes_them(number: int) -> None:
    tensor = onnx.TensorProto(dims=[number])
    data = tensor.SerializeToString()
    assert data.endswith(varint(number))
    assert [field[0] for field in fields(data, 0, len(data))] == [1]


def test_fields_have_number_type_and_place() -> None:
    data = onnx.TensorProto(name="weight", data_type=1, raw_data=b"\0" * 200).SerializeToString()
    found = {field[0]: data[field[3] : field[4]] for field in fields(data, 0, len(data))}
    assert found == {8: b"weight", 2: b"\1", 9: b"\0" * 200}
    assert data.count(field_key(9) + varint(200)) == 1


@pytest.mark.parametrize("data", [b"\x0b", b"\x0a\x05ab", b"\xff", b"\x08" + b"\xff" * 11])
def test_damaged_messages_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        list(fields(data, 0, len(data)))
