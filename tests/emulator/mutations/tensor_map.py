"""Breaks of the cache of tensor maps."""

from mutation import NUMBERS, Mutation

PROGRAMS = ["tensor_map_test.cpp"]
MAP = "csrc/cuda/tensor_map.cuh"

MUTATIONS = [
    Mutation("whatever is there is taken", MAP, "!place.used || !(place.shape == shape)", "!place.used", NUMBERS),
    Mutation("nothing is kept", MAP, "!place.used || !(place.shape == shape)", "true", NUMBERS),
    Mutation("the shape is not kept", MAP, "      place.shape = shape;\n", "", NUMBERS),
    Mutation("one place for all", MAP, "places_[hash(shape) % kPlaces]", "places_[0]", NUMBERS),
    Mutation(
        "addresses hashed without their high bits",
        MAP,
        "(h ^ x ^ x >> 32) * 0x100000001B3u; };",
        "(h ^ x) * 256; };",
        NUMBERS,
    ),
    Mutation(
        "row stride of the head",
        MAP,
        "rows > 1 ? static_cast<uint64_t>(view.row_stride)",
        "rows > 1 ? static_cast<uint64_t>(view.head_stride)",
        NUMBERS,
    ),
    Mutation("a box of one head always", MAP, "static_cast<uint32_t>(box_heads)", "1", NUMBERS),
    Mutation("threads share a cache", MAP, "static thread_local TensorMapCache", "static TensorMapCache", NUMBERS),
]
