// The scheduler: checks a call, divides it (attention_plan.h), and lets the workers run the kernels of the machine's
// instruction set (attention_kernels.h) on the pieces.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "attention_kernels.h"
#include "attention_plan.h"
#include "isa.h"
#include "scratch.h"

namespace packattn::cpu {
namespace {

const Kernels& kernels() {
  const std::string name = isa();
  const Kernels* all[] = {
#if defined(__x86_64__)
      &avx512::kernels, &avx2::kernels,
#endif
      &portable::kernels};
  for (const Kernels* k : all) {
    if (name == k->isa) return *k;
  }
  throw std::runtime_error("no CPU kernels for " + name);
}

// Calls piece(worker, i) for i in [0, count), handed out in that order, and returns when all are done.
template <class F>
void for_each(const Executor& executor, int workers, int64_t count, const F& piece) {
  if (count == 0) return;
  if (workers <= 1) {
    for (int64_t i = 0; i < count; i++) piece(0, i);
    return;
  }
  struct Shared {
    const F& piece;
    int64_t count;
    std::atomic<int64_t> next{0};
  } shared{piece, count};
  executor.run(
      workers,
      [](void* context, int worker) {
        Shared& s = *static_cast<Shared*>(context);
        for (int64_t i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.count;) s.piece(worker, i);
      },
      &shared);
}

int worker_count(const Executor& executor, int64_t pieces) {
  if (executor.run == nullptr || executor.workers < 1) return 1;
  return static_cast<int>(std::min<int64_t>(executor.workers, std::max<int64_t>(pieces, 1)));
}

size_t element_size(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

void zero_rows(const TensorView& x, const Range& rows, int heads, int dim, DType dtype) {
  const size_t size = element_size(dtype);
  for (int64_t t = rows.begin; t < rows.end; t++) {
    for (int64_t h = 0; h < heads; h++) {
      std::memset(static_cast<char*>(x.data) + (t * x.row_stride + h * x.head_stride) * static_cast<int64_t>(size), 0,
                  dim * size);
    }
  }
}

// Whether a result [rows, heads, dim] is written past the caches: if the call touches more than they hold, and if whole
// lines of it are aligned.
constexpr int64_t kLarge = int64_t{24} << 20;  // bytes
bool streams(const TensorView& x, int dim, DType dtype, int64_t touched) {
  constexpr int64_t kLine = 16;  // floats: the widest vector
  return dtype == DType::float32 && touched >= kLarge && reinterpret_cast<uintptr_t>(x.data) % 64 == 0 &&
         x.row_stride % kLine == 0 && x.head_stride % kLine == 0 && dim % kLine == 0;
}
// bytes of query and key, or of out and value
int64_t bytes(const AttentionForwardParams& p, int dim) {
  return (p.total_q * p.heads_q + p.total_k * p.heads_k) * dim * static_cast<int64_t>(element_size(p.dtype));
}
int64_t bytes(const AttentionForwardParams& p) { return bytes(p, p.head_dim) + bytes(p, p.head_dim_v); }

// The tile whose turn it is has been handed out to a worker that is running: pieces are handed out in order.
void wait_for_turn(const int32_t* turn, int32_t tile) {
  for (int spins = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != tile; spins++) {
    if (spins < 2000) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    } else {
      std::this_thread::yield();  // it may have been put off the processor
    }
  }
}

// dquery in float for 16-bit types: one buffer for each (segment, kv head) that is being worked on. No more of them
// than workers are at work, because pieces are handed out in order.
class Accumulators {
 public:
  Accumulators(float* memory, size_t each, int count) {
    for (int i = 0; i < count; i++) free_.push_back(memory + i * each);
    open_.reserve(count);  // acquire() must not throw: another worker may be waiting for this one's turn
  }
  // `pieces`: how many calls of release will follow for this id
  float* acquire(int64_t id, int64_t pieces) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Open& open : open_) {
      if (open.id == id) return open.buffer;
    }
    if (free_.empty()) return nullptr;
    open_.push_back({id, pieces, free_.back()});
    free_.pop_back();
    return open_.back().buffer;
  }
  void release(int64_t id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < open_.size(); i++) {
      if (open_[i].id != id) continue;
      if (--open_[i].pieces == 0) {
        free_.push_back(open_[i].buffer);
        open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(i));
      }
      return;
    }
  }

 private:
  struct Open {
    int64_t id, pieces;
    float* buffer;
  };
  std::mutex mutex_;
  std::vector<float*> free_;
  std::vector<Open> open_;
};

}  // namespace

void attention_forward(const AttentionForwardParams& p, const Executor& executor) {
  const Kernels& k = kernels();
  const Plan plan = make_plan(p);
  const Schedule schedule = forward_schedule(p, plan, worker_count(executor, executor.workers));
  const int64_t fills = static_cast<int64_t>(plan.empty_rows.size());
  const int workers = worker_count(executor, schedule.size() + fills);
  const size_t each = Workspace::padded(k.forward_scratch(p));
  Workspace workspace(each * workers);
  float* scratch = workspace.take(each * workers);
  const ForwardContext context{&p, plan.segments.data(), plan.runs.data(),
                               streams(p.out, p.head_dim_v, p.dtype, bytes(p))};

  for_each(executor, workers, schedule.size() + fills, [&](int worker, int64_t i) {
    if (i >= schedule.size()) {
      const Range& rows = plan.empty_rows[i - schedule.size()];
      zero_rows(p.out, rows, p.heads_q, p.head_dim_v, p.dtype);
      for (int64_t h = 0; h < p.heads_q; h++) {
        std::fill(p.lse + h * p.total_q + rows.begin, p.lse + h * p.total_q + rows.end,
                  -std::numeric_limits<float>::infinity());
      }
      return;
    }
    const int64_t end = schedule.grabs[i + 1];
    for (int64_t x = schedule.grabs[i]; x < end; x++) {
      k.forward(context, schedule.items[x], x + 1 < end ? &schedule.items[x + 1] : nullptr, scratch + worker * each);
    }
  });
}

void attention_backward(const AttentionBackwardParams& p, const Executor& executor) {
  const Kernels& k = kernels();
  const Plan plan = make_plan(p);
  if ((p.sinks == nullptr) != (p.dsinks == nullptr)) {
    throw std::invalid_argument("dsinks: expected with sinks and not without");
  }
  const Schedule schedule = backward_schedule(p, plan, worker_count(executor, executor.workers));
  const int64_t items = schedule.size(), rows = static_cast<int64_t>(plan.empty_rows.size()),
                keys = static_cast<int64_t>(plan.unseen_keys.size());
  const int workers = worker_count(executor, items + rows + keys);

  const bool in_place = p.dtype == DType::float32;  // dquery itself is the accumulator
  const size_t each = Workspace::padded(k.backward_scratch(p));
  const size_t accumulator = in_place ? 0 : Workspace::padded(schedule.accumulator);
  const int accumulator_count = static_cast<int>(std::min<int64_t>(workers, schedule.accumulators));
  const size_t delta = Workspace::padded(p.heads_q * p.total_q), turns = Workspace::padded(schedule.turns);
  Workspace workspace(each * workers + accumulator * accumulator_count + delta + turns);
  float* scratch = workspace.take(each * workers);
  BackwardContext context{};
  context.params = &p;
  context.segments = plan.segments.data();
  context.runs = plan.runs.data();
  context.delta = workspace.take(delta);
  context.turns = reinterpret_cast<int32_t*>(workspace.take(turns));
  context.wait_for_turn = wait_for_turn;
  context.stream_dquery = streams(p.dquery, p.head_dim, p.dtype, bytes(p));
  context.stream_dkey = streams(p.dkey, p.head_dim, p.dtype, bytes(p));
  context.stream_dvalue = streams(p.dvalue, p.head_dim_v, p.dtype, bytes(p));
  std::fill(context.turns, context.turns + schedule.turns, -1);  // no tile's number
  Accumulators accumulators(workspace.take(accumulator * accumulator_count), accumulator, accumulator_count);

  // Several workers read delta of a shared segment, so it comes first; elsewhere it is computed on the way.
  std::vector<Range> pieces;
  for (const int32_t s : schedule.shared) {
    for (int32_t x = plan.segments[s].run0; x < plan.segments[s].run1; x++) {
      const Run& run = plan.runs[x];
      for (int32_t r = run.q0; r < run.q1; r += 64) pieces.push_back({r, std::min(r + 64, run.q1)});
    }
  }
  for_each(executor, workers, static_cast<int64_t>(pieces.size()),
           [&](int, int64_t i) { k.delta(context, pieces[i].begin, pieces[i].end); });

  for_each(executor, workers, items + rows + keys, [&](int worker, int64_t i) {
    if (i >= items + rows) {
      zero_rows(p.dkey, plan.unseen_keys[i - items - rows], p.heads_k, p.head_dim, p.dtype);
      zero_rows(p.dvalue, plan.unseen_keys[i - items - rows], p.heads_k, p.head_dim_v, p.dtype);
      return;
    }
    if (i >= items) {
      zero_rows(p.dquery, plan.empty_rows[i - items], p.heads_q, p.head_dim, p.dtype);
      return;
    }
    const int64_t end = schedule.grabs[i + 1];
    for (int64_t x = schedule.grabs[i]; x < end; x++) {
      const Item& item = schedule.items[x];
      const Segment& segment = plan.segments[item.segment];
      if (is_direct(segment, context.runs)) {
        k.backward_direct(context, item, x + 1 < end ? &schedule.items[x + 1] : nullptr, scratch + worker * each);
        continue;
      }
      for (int32_t h = item.h0; h < item.h1; h++) {
        Next next;
        if (h + 1 < item.h1) {
          next = {&item, h + 1};
        } else if (x + 1 < end) {
          next = {&schedule.items[x + 1], schedule.items[x + 1].h0};
        }
        const int64_t id = static_cast<int64_t>(item.segment) * p.heads_k + h;
        const int32_t tiles = ceil_div(segment.k1 - segment.k0, key_tile(p));
        const bool borrow = accumulator > 0 && tiles > 1;
        float* sums = borrow ? accumulators.acquire(id, item.turns < 0 ? 1 : tiles) : nullptr;
        k.backward(context, item, h, sums, next, scratch + worker * each);
        if (borrow) accumulators.release(id);
      }
    }
  });

  if (p.sinks) {
    for_each(executor, std::min<int>(workers, p.heads_q), p.heads_q, [&](int, int64_t h) {
      p.dsinks[h] = static_cast<float>(
          k.sink_gradient(context, plan.runs.data(), static_cast<int64_t>(plan.runs.size()), static_cast<int>(h)));
    });
  }
}

}  // namespace packattn::cpu
