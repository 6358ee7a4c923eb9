"""What is true of every compiled kernel."""

from __future__ import annotations

import re
import struct

from flexpress.codegen.device.cuda import argument_format


def assert_packed_as_read(made, tensor_maps: int | None = None) -> None:
    """struct's fields are as long as the .param lines of the PTX, and as many tensor maps are among them."""
    sizes, found = [], 0
    for line in re.search(r"\.entry \w+\((.*?)\)", made.assembly["ptx"], re.S)[1].split(","):
        tensor_map = re.search(r"\.b8 \w+\[(\d+)\]", line)
        sizes.append(int(tensor_map[1]) if tensor_map else int(re.search(r"\.param \.\w(\d+)", line)[1]) // 8)
        found += tensor_map is not None
    fields = argument_format([t for t in made.signature.values() if t != "constexpr"])
    assert [struct.calcsize(field) for field in fields] == sizes
    assert fields.count("128s") == found == (found if tensor_maps is None else tensor_maps)
