// A thread of a block as a fiber: a stack of its own, switched to and from in user space.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>

#include "global_memory.h"

#if PACKATTN_EMULATOR_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
// 0: the system's swapcontext, on any processor.
#if !defined(PACKATTN_EMULATOR_ASM_SWITCH)
#if defined(__x86_64__)
#define PACKATTN_EMULATOR_ASM_SWITCH 1
#else
#define PACKATTN_EMULATOR_ASM_SWITCH 0
#endif
#endif
#if !PACKATTN_EMULATOR_ASM_SWITCH
#include <ucontext.h>
#endif

namespace packattn::emu {

#if PACKATTN_EMULATOR_ASM_SWITCH
// Saves what the x86-64 calling convention has a function keep, exchanges the stack pointers, returns on the other
// stack. The system's swapcontext does a system call for the signal mask: six times slower over a whole kernel.
extern "C" __attribute__((naked, noinline, weak)) void packattn_emulator_switch(void** /*save*/, void* /*load*/) {
  asm(R"(
    endbr64
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret)");
}
#endif

// A point of execution that can be left and come back to. Without a stack: the context of the scheduler's caller.
struct Fiber {
#if PACKATTN_EMULATOR_ASM_SWITCH
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
  char* stack = nullptr;
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;  // AddressSanitizer's

  // Will run `entry` (which never returns) when first switched to.
  void start(void (*entry)()) {
    fake_stack = nullptr;
#if PACKATTN_EMULATOR_ASAN
    ASAN_UNPOISON_MEMORY_REGION(stack, stack_bytes);
#endif
#if PACKATTN_EMULATOR_ASM_SWITCH
    void** top = reinterpret_cast<void**>(stack + stack_bytes);
    *--top = nullptr;  // a return address for entry, which keeps the stack 16-aligned as at a call
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    stack_pointer = top;
#else
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = stack_bytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
#endif
  }

  // Leaves this fiber (for good if `done`) for another.
  void switch_to(Fiber& other, [[maybe_unused]] bool done = false) {
#if PACKATTN_EMULATOR_ASAN
    __sanitizer_start_switch_fiber(done ? nullptr : &fake_stack, other.stack, other.stack_bytes);
#endif
#if PACKATTN_EMULATOR_ASM_SWITCH
    packattn_emulator_switch(&stack_pointer, other.stack_pointer);
#else
    swapcontext(&context, &other.context);
#endif
    arrived(nullptr);
  }

  // To be called first thing on any stack that was switched to. caller: a Fiber that learns where the stack lies that
  // was left, if it has not known.
  void arrived([[maybe_unused]] Fiber* caller) {
#if PACKATTN_EMULATOR_ASAN
    const void* bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(fake_stack, &bottom, &bytes);
    if (caller && !caller->stack) {
      caller->stack = static_cast<char*>(const_cast<void*>(bottom));
      caller->stack_bytes = bytes;
    }
#endif
  }
};

// Stacks, each with a page under it that must not be touched, kept from launch to launch.
class StackPool {
 public:
  static constexpr size_t kStack = PACKATTN_EMULATOR_ASAN ? 256 * 1024 : 64 * 1024, kGuard = 4096;

  StackPool() = default;
  StackPool(const StackPool&) = delete;
  StackPool& operator=(const StackPool&) = delete;
  ~StackPool() { release(); }

  void reserve(int count) {
    if (count <= count_) return;
    release();
    base_ = static_cast<char*>(mmap(nullptr, (kStack + kGuard) * static_cast<size_t>(count), PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (base_ == MAP_FAILED) std::abort();
    count_ = count;
    for (int i = 0; i < count; ++i) mprotect((*this)[i] - kGuard, kGuard, PROT_NONE);
  }
  char* operator[](int i) const { return base_ + (kStack + kGuard) * static_cast<size_t>(i) + kGuard; }

 private:
  void release() {
    if (!base_) return;
#if PACKATTN_EMULATOR_ASAN
    ASAN_UNPOISON_MEMORY_REGION(base_, (kStack + kGuard) * static_cast<size_t>(count_));
#endif
    munmap(base_, (kStack + kGuard) * static_cast<size_t>(count_));
    base_ = nullptr;
  }
  char* base_ = nullptr;
  int count_ = 0;
};

}  // namespace packattn::emu
