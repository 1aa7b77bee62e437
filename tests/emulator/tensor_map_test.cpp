// Tensor maps and the cache of them: every number that goes into a map makes another one, what was asked for lately is
// not made again, and only so many are kept.
//
//   tensor_map_test     exit status 1 for a wrong map
#include "tensor_map.cuh"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

namespace {

using namespace packattn::cuda;
using packattn::TensorView;

void require(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "tensor map: %s\n", what);
  std::exit(1);
}

bool same(const TmaMap& a, const TmaMap& b) {
  bool equal = a.base == b.base && a.rank == b.rank && a.swizzle == b.swizzle;
  for (int i = 0; i < 3; ++i)
    equal = equal && a.size[i] == b.size[i] && a.stride[i] == b.stride[i] && a.box[i] == b.box[i];
  return equal;
}

// What tensor_map is called with.
struct Arguments {
  TensorView view;
  int64_t rows;
  int heads, columns, box_rows, box_heads;

  TmaMap cached() const { return tensor_map("query", view, rows, heads, columns, box_rows, box_heads); }
  TensorMapShape shape() const { return tensor_map_shape(view, rows, heads, columns, box_rows, box_heads); }
};

// One of everything that differs in one number from `one`.
std::vector<Arguments> neighbours(const Arguments& one) {
  std::vector<Arguments> all(8, one);
  all[1].view.data = static_cast<char*>(one.view.data) + 256;
  all[2].view.row_stride += 64;
  all[3].view.head_stride += 64;
  all[4].rows += 1;
  all[5].heads += 1;
  all[6].columns += 8;
  all[7].box_rows /= 2;
  all.push_back(one);
  all.back().box_heads *= 2;
  return all;
}

void every_number_counts() {
  static char memory[4096];
  const Arguments one{{memory, 1024, 128}, 100, 8, 128, 64, 1};
  const std::vector<Arguments> all = neighbours(one);
  for (int round = 0; round < 3; ++round) {
    for (const Arguments& x : all) {
      const TmaMap map = x.cached();
      require(map.base == x.view.data, "another address");
      require(map.size[0] == static_cast<uint64_t>(x.columns) && map.size[1] == static_cast<uint64_t>(x.heads) &&
                  map.size[2] == static_cast<uint64_t>(x.rows),
              "another size");
      require(map.stride[1] == static_cast<uint64_t>(x.view.head_stride) * 2 &&
                  map.stride[2] == static_cast<uint64_t>(x.view.row_stride) * 2,
              "another stride");
      require(map.box[0] == 64 && map.box[1] == static_cast<uint32_t>(x.box_heads) &&
                  map.box[2] == static_cast<uint32_t>(x.box_rows),
              "another box");
    }
  }
  // Strides of a dimension of size 1 say nothing, and such maps are one.
  Arguments row = one, head = one;
  row.rows = 1, head.heads = 1;
  Arguments wide_row = row, wide_head = head;
  wide_row.view.row_stride = 0, wide_head.view.head_stride = 0;
  require(row.shape() == wide_row.shape() && head.shape() == wide_head.shape(), "strides of one row or head");
  Arguments none = one;
  none.rows = 0;
  require(none.cached().base == nullptr, "a map of no rows");
}

// The tensors of a model of many layers, a step again and again: nearly all are there.
void steps_of_a_training() {
  TensorMapCache cache;
  int made = 0;
  const auto make = [&made](const TensorMapShape& shape) {
    ++made;
    return make_tensor_map("key", shape);
  };
  constexpr int kTensors = 96;
  const auto tensor = [](int i) {
    void* const data = reinterpret_cast<void*>(0x7F0000000000u + (static_cast<uintptr_t>(i) << 21));
    return Arguments{{data, 1024, 128}, 4096, 8, 128, 64, 1}.shape();
  };
  for (int step = 0; step < 10; ++step) {
    for (int i = 0; i < kTensors; ++i) {
      require(same(cache.get(tensor(i), make), make_tensor_map("key", tensor(i))), "the map of another tensor");
    }
  }
  // 96 on 256 places: about 30 share theirs with another and are made in every step.
  require(made < kTensors * 5, "maps are made again and again");
}

void only_so_many_are_kept() {
  TensorMapCache cache;
  size_t made = 0;
  const auto make = [&made](const TensorMapShape& shape) {
    ++made;
    return make_tensor_map("key", shape);
  };
  std::mt19937_64 random(1);
  std::vector<TensorMapShape> shapes;
  for (size_t i = 0; i < 20 * TensorMapCache::kPlaces; ++i) {
    void* const data = reinterpret_cast<void*>(random() % (1u << 30) * 16);
    shapes.push_back(Arguments{{data, 1024, 128}, 1 + static_cast<int64_t>(i), 8, 128, 64, 1}.shape());
  }
  for (const TensorMapShape& shape : shapes) cache.get(shape, make);
  require(made == shapes.size(), "a map of one tensor for another");
  for (auto shape = shapes.rbegin(); shape != shapes.rend(); ++shape) {  // the latest first: what is kept is found
    require(same(cache.get(*shape, make), make_tensor_map("key", *shape)), "the map of another tensor");
  }
  const size_t found = 2 * shapes.size() - made;
  require(found > TensorMapCache::kPlaces / 2, "little is kept");
  require(found <= TensorMapCache::kPlaces, "more is kept than there are places");
}

// What make throws leaves the cache as it was.
void failures_are_not_kept() {
  TensorMapCache cache;
  const TensorMapShape shape = Arguments{{nullptr, 1024, 128}, 5, 8, 128, 64, 1}.shape();
  for (int i = 0; i < 2; ++i) {
    bool thrown = false;
    try {
      cache.get(shape, [](const TensorMapShape&) -> TmaMap { throw std::runtime_error("no map"); });
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    require(thrown, "a map that was not made");
  }
  require(cache.get(shape, [](const TensorMapShape& x) { return make_tensor_map("key", x); }).size[2] == 5, "no map");
}

// Tensors that have one place in a cache: each puts the other out.
std::vector<Arguments> of_one_place(size_t count) {
  static char memory[16];
  std::vector<Arguments> all{{{memory, 1024, 128}, 100, 8, 128, 64, 1}};
  for (int64_t rows = 101; all.size() < count; ++rows) {
    Arguments other = all[0];
    other.rows = rows;
    TensorMapCache cache;
    int made = 0;
    for (const Arguments& x : {all[0], other, all[0]}) {
      cache.get(x.shape(), [&made](const TensorMapShape& shape) {
        ++made;
        return make_tensor_map("key", shape);
      });
    }
    if (made == 3) all.push_back(other);
  }
  return all;
}

// Threads at whose maps another is writing would get wrong ones.
void threads_have_their_own() {
  const std::vector<Arguments> tensors = of_one_place(4);
  std::vector<int> wrong(tensors.size(), 0);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < tensors.size(); ++t) {
    threads.emplace_back([x = tensors[t], &count = wrong[t]] {
      const TmaMap right = make_tensor_map("key", x.shape());
      for (int i = 0; i < 500000; ++i) count += !same(x.cached(), right);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const int count : wrong) require(count == 0, "the map of another thread");
}

}  // namespace

int main() {
  every_number_counts();
  steps_of_a_training();
  only_so_many_are_kept();
  failures_are_not_kept();
  threads_have_their_own();
  std::puts("tensor maps: all right");
  return 0;
}
