#include "tests/simt/simt.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)
// What swapcontext does, without its two system calls: pushes the registers that a call preserves, leaves the stack
// pointer at *from, and goes on where `to` left off.
asm(R"(
.text
.hidden gradfuse_simt_switch
.globl gradfuse_simt_switch
.type gradfuse_simt_switch, @function
gradfuse_simt_switch:
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
  ret
.size gradfuse_simt_switch, . - gradfuse_simt_switch
)");
extern "C" void gradfuse_simt_switch(void** from, void* to);
#else
#include <ucontext.h>
#endif

namespace gradfuse::simt {
namespace {

constexpr unsigned kWarp = 32;
constexpr size_t kStackBytes = 256 << 10;
constexpr unsigned char kGarbage = 0xff;  // NaN as a float, out of every range as an index

enum class State { kReady, kAtBarrier, kInWarp, kDone };

// The stack of a fibre or of the scheduler, and where it left off.
struct Context {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
  void* fake_stack = nullptr;
  const void* stack = nullptr;
  size_t stack_bytes = 0;
};

// Makes `context` begin with enter() on its stack.
void Prepare(Context& context, void (*enter)()) {
#if defined(__x86_64__)
  auto* top = reinterpret_cast<void**>(static_cast<char*>(const_cast<void*>(context.stack)) + context.stack_bytes);
  *--top = nullptr;  // as after a call: the stack is aligned to 16 bytes less one address
  *--top = reinterpret_cast<void*>(enter);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  context.stack_pointer = top;
#else
  getcontext(&context.context);
  context.context.uc_stack.ss_sp = const_cast<void*>(context.stack);
  context.context.uc_stack.ss_size = context.stack_bytes;
  context.context.uc_link = nullptr;
  makecontext(&context.context, enter, 0);
#endif
}

void SwitchTo(Context& from, Context& to) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_bytes);
#endif
#if defined(__x86_64__)
  gradfuse_simt_switch(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.context, &to.context);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

struct Fibre {
  Context context;
  Position here;
  State state = State::kDone;
  int collective = 0;    // which one it waits in
  uint64_t brought = 0;  // to a shuffle

  explicit Fibre(size_t index) {
    void* stack =
        mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) throw std::bad_alloc();
    context.stack = stack;
    // Stacks that all began at the same place in a page would share few lines of the cache.
    context.stack_bytes = kStackBytes - index % 64 * 192;
  }
  Fibre(const Fibre&) = delete;
  Fibre& operator=(const Fibre&) = delete;
  ~Fibre() { munmap(const_cast<void*>(context.stack), kStackBytes); }
};

// What lanes of one warp meet in: a shuffle by a mask, or a barrier.
constexpr int kWarpBarrier = -1;

struct Warp {
  std::vector<Fibre*> ready;
  unsigned arrived = 0;
  int collective = 0;
  uint64_t values[2][kWarp];
  int generation = 0;
};

class Machine {
 public:
  static Machine& Get() {
    static Machine& machine = *new Machine;
    return machine;
  }

  void Run(unsigned blocks, unsigned threads, const std::function<void()>& thread) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (threads == 0 || threads % kWarp != 0 || threads > 1024) throw KernelError("simt: a block of broken warps");
    body_ = &thread;
    std::vector<unsigned> order(blocks);
    for (unsigned block = 0; block < blocks; ++block) order[block] = block;
    std::shuffle(order.begin(), order.end(), random_);
    for (unsigned block : order) RunBlock(block, blocks, threads);
  }

  int64_t MaxBlocks() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const unsigned choice = static_cast<unsigned>(random_() % 8);
    return choice < 4 ? choice + 1 : std::numeric_limits<int32_t>::max();
  }

  void Seed(uint64_t seed) {
    const std::lock_guard<std::mutex> lock(mutex_);
    random_.seed(seed);
  }

  Fibre& current() { return *current_; }

  // Leaves the current fibre until it is ready again.
  void Wait(State state, int collective) {
    Fibre& fibre = *current_;
    fibre.state = state;
    fibre.collective = collective;
    SwitchTo(fibre.context, scheduler_);
  }

  // The values of the whole warp.
  const uint64_t* Meet(int collective, uint64_t value) {
    Warp& warp = warps_[current_->here.thread.x / kWarp];
    uint64_t* values = warp.values[warp.generation % 2];
    values[current_->here.thread.x % kWarp] = value;
    ++warp.arrived;
    Wait(State::kInWarp, collective);
    return values;
  }

  void* SharedBytes(const void* place, size_t bytes) {
    for (const Shared& shared : shared_) {
      if (shared.place == place) return shared.memory.get();
    }
    shared_.emplace_back(place, static_cast<unsigned char*>(std::malloc(bytes)));
    std::memset(shared_.back().memory.get(), kGarbage, bytes);
    return shared_.back().memory.get();
  }

  [[noreturn]] void Fail(const char* what) {
    error_ = std::string("simt: ") + what;
    SwitchTo(current_->context, scheduler_);
    std::abort();
  }

 private:
  struct Shared {
    struct Free {
      void operator()(unsigned char* memory) const { std::free(memory); }
    };
    Shared(const void* place_, unsigned char* memory_) : place(place_), memory(memory_) {}
    const void* place;
    std::unique_ptr<unsigned char, Free> memory;
  };

  static void Enter() {
    Machine& machine = Get();
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &machine.scheduler_.stack, &machine.scheduler_.stack_bytes);
#endif
    for (;;) {
      (*machine.body_)();
      machine.Wait(State::kDone, 0);
    }
  }

  void RunBlock(unsigned block, unsigned blocks, unsigned threads) {
    shared_.clear();
    warps_.assign(threads / kWarp, Warp{});
    for (size_t index = fibres_.size(); index < threads; ++index) {
      fibres_.push_back(std::make_unique<Fibre>(index));
      Prepare(fibres_.back()->context, Enter);
    }
    order_.resize(threads / kWarp);
    for (unsigned warp = 0; warp < order_.size(); ++warp) order_[warp] = warp;
    std::shuffle(order_.begin(), order_.end(), random_);
    ready_ = 0;
    for (unsigned index = 0; index < threads; ++index) {
      Fibre& fibre = *fibres_[index];
      fibre.here = {{index}, {block}, {threads}, {blocks}};
      MakeReady(fibre);
    }
    unsigned at_barrier = 0;
    unsigned done = 0;
    while (done < threads) {
      if (ready_ == 0) {
        if (at_barrier < threads) Abandon(Deadlock(threads));
        at_barrier = 0;
        for (unsigned index = 0; index < threads; ++index) MakeReady(*fibres_[index]);
      }
      current_ = &Pick();
      SwitchTo(scheduler_, current_->context);
      if (!error_.empty()) Abandon(error_);
      at_barrier += current_->state == State::kAtBarrier;
      done += current_->state == State::kDone;
      if (current_->state == State::kInWarp) ReleaseWarp(current_->here.thread.x / kWarp);
    }
  }

  void MakeReady(Fibre& fibre) {
    fibre.state = State::kReady;
    warps_[fibre.here.thread.x / kWarp].ready.push_back(&fibre);
    ++ready_;
  }

  // Some warps run as far as they can while others have not begun: so they meet what these have yet to read. Now and
  // then others take the lead.
  Fibre& Pick() {
    if (random_() % 256 == 0) std::shuffle(order_.begin(), order_.end(), random_);
    for (unsigned index : order_) {
      std::vector<Fibre*>& ready = warps_[index].ready;
      if (ready.empty()) continue;
      std::swap(ready[random_() % ready.size()], ready.back());
      Fibre& fibre = *ready.back();
      ready.pop_back();
      --ready_;
      return fibre;
    }
    std::abort();
  }

  void ReleaseWarp(unsigned index) {
    Warp& warp = warps_[index];
    if (warp.arrived == 1) warp.collective = current_->collective;
    if (warp.collective != current_->collective) Abandon("simt: lanes of a warp that meet in different operations");
    if (warp.arrived < kWarp) return;
    warp.arrived = 0;
    ++warp.generation;
    for (unsigned lane = 0; lane < kWarp; ++lane) MakeReady(*fibres_[index * kWarp + lane]);
  }

  std::string Deadlock(unsigned threads) const {
    unsigned counts[4] = {};
    for (unsigned index = 0; index < threads; ++index) ++counts[static_cast<int>(fibres_[index]->state)];
    return "simt: divergence: of " + std::to_string(threads) + " threads " + std::to_string(counts[1]) +
           " wait at a barrier, " + std::to_string(counts[2]) + " in a warp, " + std::to_string(counts[3]) +
           " have returned";
  }

  // Forgets the fibres where they are: kernels own nothing.
  [[noreturn]] void Abandon(const std::string& why) {
    const std::string message = why;
    error_.clear();
    fibres_.clear();
    throw KernelError(message);
  }

  std::mutex mutex_;
  std::mt19937_64 random_;
  const std::function<void()>* body_ = nullptr;
  Context scheduler_;
  std::vector<std::unique_ptr<Fibre>> fibres_;
  unsigned ready_ = 0;
  std::vector<unsigned> order_;  // of warps: the first that can runs
  std::vector<Warp> warps_;
  std::vector<Shared> shared_;
  Fibre* current_ = nullptr;
  std::string error_;
};

}  // namespace

void Run(unsigned blocks, unsigned threads, const std::function<void()>& thread) {
  Machine::Get().Run(blocks, threads, thread);
}
void Launch(void* stream, unsigned blocks, unsigned threads, std::function<void()> thread) {
  if (stream == nullptr) return Run(blocks, threads, thread);
  static_cast<Stream*>(stream)->Add([=] { Run(blocks, threads, thread); });
}
int64_t MaxBlocks() { return Machine::Get().MaxBlocks(); }
void Seed(uint64_t seed) { Machine::Get().Seed(seed); }
const Position& Here() { return Machine::Get().current().here; }
void Fail(const char* what) { Machine::Get().Fail(what); }
void Barrier() { Machine::Get().Wait(State::kAtBarrier, 0); }
void WarpBarrier() { Machine::Get().Meet(kWarpBarrier, 0); }
uint64_t ShuffleXorBits(uint64_t bits, int mask) {
  const unsigned lane = Here().thread.x % kWarp;
  return Machine::Get().Meet(mask, bits)[lane ^ static_cast<unsigned>(mask)];
}
void* SharedBytes(const void* place, size_t bytes) { return Machine::Get().SharedBytes(place, bytes); }

}  // namespace gradfuse::simt
