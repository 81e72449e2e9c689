// A backend of torch.distributed for tensors on processors that has the manners of NCCL on GPUs, as they were measured:
// collectives only enqueue, what is interrupted ends as success with noise, here and on peers. Ranks are processes of
// one machine. "Kernels" are functions in a thread per communicator, its stream; they spin on memory that ranks share.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <sys/mman.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <condition_variable>
#include <deque>
#include <fcntl.h>
#include <list>
#include <set>
#include <thread>
#include <unistd.h>

using namespace c10d;
using std::shared_ptr;
using std::string;
using Tensors = std::vector<at::Tensor>;

namespace {
constexpr int MOST = 16;                             // ranks of a communicator
constexpr size_t SLOT = 256 << 10, BOX = 64 << 10;   // bytes that a rank shows to all others, or to one
enum Code { SUCCESS = 0, INVALID_USAGE = 5, IN_PROGRESS = 7 };

std::atomic<int> linger_us{0};                       // how long a call takes at least, for races to be found

void nap(int us) { if (us) usleep(us); else sched_yield(); }
[[noreturn]] void fatal(const char* what) {          // on a GPU: an illegal memory access, or worse
  fprintf(stderr, "likenccl: %s\n", what);
  std::abort();
}
void invalid(const string& what) {
  C10_THROW_ERROR(DistBackendError, "NCCL error in: likenccl, invalid usage, NCCL version 2.30.7\nncclInvalidUsage: " + what);
}

struct WithoutGil {
  PyThreadState* held = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutGil() { if (held) PyEval_RestoreThread(held); }
};

// --- Streams ---------------------------------------------------------------------------------------------------------

struct Op;
using Ops = std::vector<shared_ptr<Op>>;
struct Op {                                          // a kernel
  std::atomic<bool> done{false};
  Ops after;                                         // what the stream that launched it had waited for
  std::function<void()> run;
  Tensors outputs, inputs;
  std::set<const void*> touched;                     // memory of these
};

// Never destroyed: threads may still wait on them when the process ends, and would keep it from ending.
auto& lock = *new std::mutex;                        // of these books; whoever has it copies no tensor, and drops none
auto& changed = *new std::condition_variable;
auto& ordered = *new Ops;                            // what the current stream, one for the process, waits for
auto& launched = *new std::list<std::weak_ptr<Op>>;
std::atomic<size_t> waiting{0};
thread_local bool is_stream = false;

void tidy() {                                        // locked
  std::erase_if(ordered, [](auto& op) { return op->done.load(); });
  launched.remove_if([](auto& weak) { auto op = weak.lock(); return !op || op->done; });
  waiting = ordered.size();
}
void until_done(const Ops& ops) {
  WithoutGil free;
  std::unique_lock held(lock);
  for (auto& op : ops) changed.wait(held, [&] { return op->done.load(); });
}
Ops now_ordered() { std::lock_guard held(lock); tidy(); return ordered; }
void order(const Ops& ops) {                         // what is enqueued from now on comes later than they
  std::lock_guard held(lock);
  ordered.insert(ordered.end(), ops.begin(), ops.end());
  tidy();
}
void synchronize() {                                 // wait until all streams are idle
  Ops all;
  {
    std::lock_guard held(lock);
    for (auto& weak : launched) if (auto op = weak.lock()) all.push_back(op);
  }
  until_done(all);
}

const void* memory(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

struct Stream {
  std::deque<shared_ptr<Op>> queue;
  std::thread thread;
  bool stop = false;
  pid_t pid = getpid();

  void push(shared_ptr<Op> op) {
    std::lock_guard held(lock);
    tidy();
    op->after = ordered;
    launched.push_back(op);
    queue.push_back(std::move(op));
    if (!thread.joinable()) thread = std::thread([this] { loop(); });
    changed.notify_all();
  }
  void loop() {
    is_stream = true;
    at::AutoDispatchBelowADInplaceOrView below;      // nothing of autograd's sees what a kernel writes
    std::unique_lock held(lock);
    while (true) {
      changed.wait(held, [&] { return stop || !queue.empty(); });
      if (queue.empty()) return;
      auto op = queue.front();
      for (auto& each : op->after) changed.wait(held, [&] { return each->done.load(); });
      held.unlock();
      op->run();
      op->run = nullptr, op->after.clear(), op->outputs.clear(), op->inputs.clear();
      held.lock();
      queue.pop_front();
      op->done = true;
      tidy();
      changed.notify_all();
    }
  }
  void end() {
    if (!thread.joinable()) return;
    if (getpid() != pid) { thread.detach(); return; }  // a fork has none of the threads
    WithoutGil free;
    { std::lock_guard held(lock); stop = true; }
    changed.notify_all();
    thread.join();
  }
};

// --- Communicators ---------------------------------------------------------------------------------------------------

struct Box { std::atomic<uint64_t> sent, taken; char data[BOX]; };
struct Shared {
  std::atomic<int> here[MOST];
  std::atomic<uint64_t> ready[MOST], taken[MOST];    // steps that a rank has shown, and has read of all others
  char slots[MOST][SLOT];
  Box boxes[MOST][MOST];                             // from, to
};
struct Move { bool sends; int peer; char* at; size_t bytes, done = 0; };
char* raw(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

struct Comm;
auto& living = *new std::set<Comm*>;

struct Comm {
  int rank, size, file = -1;
  bool blocking;
  Shared* shared = nullptr;
  uint64_t step = 0;
  std::atomic<bool> cut{false}, aborted{false};
  std::atomic<int> error{SUCCESS}, inside{0};
  Stream stream;

  Comm(int rank, int size, bool blocking) : rank(rank), size(size), blocking(blocking) {
    std::lock_guard held(lock);
    living.insert(this);
  }
  ~Comm() {
    cut = true;
    { std::lock_guard held(lock); living.erase(this); }
    stream.end();
    if (shared) munmap(shared, sizeof(Shared));
    if (file >= 0) close(file);
  }
  void connect(Store& store) {
    if (rank == 0) {
      file = memfd_create("likenccl", MFD_CLOEXEC);
      TORCH_CHECK(file >= 0 && ftruncate(file, sizeof(Shared)) == 0, "likenccl: no memory to share");
      store.set("likenccl", "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file));
    } else {
      file = open(store.get_to_str("likenccl").c_str(), O_RDWR | O_CLOEXEC);
      if (file < 0) C10_THROW_ERROR(DistBackendError, "NCCL error: remote process exited or there was a network error");
    }
    shared = static_cast<Shared*>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    TORCH_CHECK(shared != MAP_FAILED, "likenccl: no memory to share");
    shared->here[rank] = 1;
    if (blocking) connected();
  }
  void connected() {                                 // nothing interrupts this
    auto limit = getenv("TORCH_NCCL_NONBLOCKING_TIMEOUT");
    int64_t left = blocking || !limit ? INT64_MAX : int64_t(1e6 * atof(limit));
    for (int each = 0; each < size; each++)
      for (; !shared->here[each]; left -= 200, nap(200))
        if (left <= 0) C10_THROW_ERROR(DistBackendError, "NCCL timeout in: likenccl");
  }

  // A kernel that was interrupted waits for nobody: it posts the steps that are left with what is in its buffers.
  template <class F> void spin(F there) {
    for (int times = 0; !cut && !there(); times++) nap(times < 50 ? 0 : times < 2000 ? 50 : 1000);
  }
  at::Tensor rows(const at::Tensor& given) {         // what all ranks have given, a row each
    auto own = given.contiguous(), all = at::empty({size, own.numel()}, own.options());
    size_t bytes = own.nbytes();
    for (size_t at = 0; at == 0 || at < bytes; at += SLOT) {
      size_t n = std::min(SLOT, bytes - at);
      step++;
      for (int each = 0; each < size; each++) spin([&] { return shared->taken[each] + 1 >= step; });
      if (!cut) memcpy(shared->slots[rank], raw(own) + at, n);
      shared->ready[rank] = step;
      for (int each = 0; each < size; each++) spin([&] { return shared->ready[each] >= step; });
      if (cut) memset(shared->slots[rank], 0xff, SLOT), shared->ready[rank] = step;
      for (int each = 0; each < size; each++) memcpy(raw(all) + each * bytes + at, shared->slots[each], n);
      shared->taken[rank] = step;
    }
    return all;
  }
  void transfer(std::vector<Move> moves) {           // sends and receives, all at once; in order between two ranks
    auto is_open = [](Move& move) { return move.done < move.bytes; };
    while (std::any_of(moves.begin(), moves.end(), is_open)) {
      std::set<std::pair<int, bool>> busy;
      bool moved = false;
      for (auto& [sends, peer, at, bytes, done] : moves) {
        if (done == bytes || !busy.emplace(peer, sends).second) continue;
        Box& box = sends ? shared->boxes[rank][peer] : shared->boxes[peer][rank];
        if (!cut && (box.sent > box.taken) == sends) continue;
        size_t n = std::min(BOX, bytes - done);
        if (!sends) memcpy(at + done, box.data, n), box.taken++;
        else cut ? memset(box.data, 0xff, n) : memcpy(box.data, at + done, n), box.sent++;
        done += n, moved = true;
      }
      if (!moved) nap(50);
    }
  }
};

struct Inside {                                      // a call of it
  Comm& comm;
  explicit Inside(Comm& comm) : comm(comm) { comm.inside++; }
  ~Inside() { comm.inside--; }
};

void make_noise(Tensors& outputs) {
  for (auto& each : outputs) each.is_floating_point() ? (void)each.fill_(NAN) : (void)memset(raw(each), 0x5a, each.nbytes());
}

// --- Groups of calls -------------------------------------------------------------------------------------------------

struct Call { shared_ptr<Comm> comm; shared_ptr<Op> op; std::vector<Move> moves; };
thread_local int depth = 0;                          // of ncclGroupStart in this thread
thread_local std::vector<Call> calls;                // since then

void launch(const Call& call) {
  auto run = call.op->run;
  call.op->run = [run, moves = call.moves, comm = call.comm.get(), op = call.op.get()] {
    run ? run() : comm->transfer(moves);
    if (comm->cut) make_noise(op->outputs);
  };
  call.comm->stream.push(call.op);
}
Code group_end(Ops& ops) {
  if (depth == 0) return INVALID_USAGE;
  if (--depth) return SUCCESS;
  auto all = std::exchange(calls, {});
  for (auto& call : all) if (call.comm->cut) return INVALID_USAGE;
  for (size_t i = 0; i < all.size(); i++) {
    auto& call = all[i];
    if (!call.op) continue;
    if (!call.op->run)                               // sends and receives of one communicator are one kernel
      for (size_t j = i + 1; j < all.size(); j++)
        if (auto& other = all[j]; other.op && !other.op->run && other.comm == call.comm) {
          call.moves.insert(call.moves.end(), other.moves.begin(), other.moves.end());
          call.op->outputs.insert(call.op->outputs.end(), other.op->outputs.begin(), other.op->outputs.end());
          call.op->inputs.insert(call.op->inputs.end(), other.op->inputs.begin(), other.op->inputs.end());
          call.op->touched.merge(other.op->touched);
          other.op = nullptr;
        }
    launch(call);
    ops.push_back(call.op);
  }
  return SUCCESS;
}

// --- torch's side ----------------------------------------------------------------------------------------------------

struct LikeWork : Work {
  Ops ops;
  Tensors outputs;
  LikeWork(int rank, OpType type, Ops ops, Tensors outputs) : Work(rank, type), ops(std::move(ops)), outputs(std::move(outputs)) {}
  bool isCompleted() override { return std::all_of(ops.begin(), ops.end(), [](auto& op) { return op->done.load(); }); }
  bool isSuccess() const override { return const_cast<LikeWork*>(this)->isCompleted(); }
  std::exception_ptr exception() const override { return nullptr; }
  void synchronize() override { order(ops); }
  bool wait(std::chrono::milliseconds = kNoTimeout) override { synchronize(); return true; }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {  // done at once: what uses it is enqueued later
    synchronize();
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(at::IValue(outputs));
    return future;
  }
};
using Began = c10::intrusive_ptr<Work>;

class LikeNccl : public Backend {
 public:
  LikeNccl(c10::intrusive_ptr<Store> store, int rank, int size, bool blocking)
      : Backend(rank, size), store_(std::move(store)), comm_(std::make_shared<Comm>(rank, size, blocking)) {}
  ~LikeNccl() override { if (getpid() == pid_ && !comm_->aborted) abort(); }
  const string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds) override {}
  void eagerConnectSingleDevice(at::Device) override { WithoutGil free; comm_->connect(*store_); }
  intptr_t pointer() { comm_->connected(); return reinterpret_cast<intptr_t>(comm_.get()); }  // with the interpreter's lock
  void abort() override {
    WithoutGil free;
    if (comm_->inside) fatal("aborted while another thread is within a call of it");
    comm_->cut = comm_->aborted = true;
    synchronize();
    std::lock_guard held(lock);
    living.erase(comm_.get());
  }
  void shutdown() override { abort(); }

  void startCoalescing() override { depth++; coalesced_ = false; }
  Began endCoalescing() override {
    Ops ops;
    if (group_end(ops) != SUCCESS) invalid("a call of this group was of a communicator that was revoked");
    return coalesced_ ? c10::make_intrusive<LikeWork>(rank_, OpType::COALESCED, ops, Tensors{}) : nullptr;
  }

  Began allreduce(Tensors& ts, const AllreduceOptions& o) override { return summed(ts, o.reduceOp, -1, o.asyncOp); }
  Began allreduce_coalesced(Tensors& ts, const AllreduceCoalescedOptions& o) override { return summed(ts, o.reduceOp, -1, o.asyncOp); }
  Began reduce(Tensors& ts, const ReduceOptions& o) override { return summed(ts, o.reduceOp, o.rootRank, o.asyncOp); }
  Began broadcast(Tensors& ts, const BroadcastOptions& o) override {
    return begin(OpType::BROADCAST, ts, ts, o.asyncOp, [t = ts.at(0), root = o.rootRank](Comm& c) { put(t, c.rows(t)[root]); });
  }
  Began allgather(std::vector<Tensors>& outs, Tensors& ins, const AllgatherOptions& o) override {
    return begin(OpType::ALLGATHER, outs.at(0), ins, o.asyncOp, [out = outs[0], in = ins.at(0)](Comm& c) { put(out, c.rows(in)); });
  }
  Began gather(std::vector<Tensors>& outs, Tensors& ins, const GatherOptions& o) override {
    auto out = outs.empty() ? Tensors{} : outs[0];
    return begin(OpType::GATHER, out, ins, o.asyncOp, [out, in = ins.at(0)](Comm& c) { put(out, c.rows(in)); });
  }
  Began _allgather_base(at::Tensor& out, at::Tensor& in, const AllgatherOptions& o) override {
    Tensors outs{out}, ins{in};
    return allgather_into_tensor_coalesced(outs, ins, o);
  }
  Began allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const AllgatherOptions& o) override {
    return begin(OpType::COALESCED, outs, ins, o.asyncOp, [outs, ins](Comm& c) {
      for (size_t i = 0; i < ins.size(); i++) put(outs[i], c.rows(ins[i]));
    });
  }
  Began scatter(Tensors& outs, std::vector<Tensors>& ins, const ScatterOptions& o) override {
    return begin(OpType::SCATTER, outs, ins.empty() ? Tensors{} : ins[0], o.asyncOp, [out = outs.at(0), ins = ins.empty() ? Tensors{} : ins[0], root = o.rootRank](Comm& c) {
      auto own = ins.empty() ? at::zeros({c.size, out.numel()}, out.options()) : at::stack(ins);
      put(out, c.rows(own)[root].chunk(c.size)[c.rank]);
    });
  }
  Began reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const ReduceScatterOptions& o) override {
    return begin(OpType::REDUCE_SCATTER, outs, ins.at(0), o.asyncOp, [out = outs.at(0), ins = ins.at(0), op = o.reduceOp](Comm& c) {
      Tensors flat;
      for (auto& each : ins) flat.push_back(each.reshape(-1));
      int64_t before = 0;
      for (int each = 0; each < c.rank; each++) before += ins[each].numel();
      put(out, folded(c.rows(at::cat(flat)).narrow(1, before, out.numel()), op));
    });
  }
  Began _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const ReduceScatterOptions& o) override {
    Tensors outs{out}, ins{in};
    return reduce_scatter_tensor_coalesced(outs, ins, o);
  }
  Began reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const ReduceScatterOptions& o) override {
    return begin(OpType::COALESCED, outs, ins, o.asyncOp, [outs, ins, op = o.reduceOp](Comm& c) {
      for (size_t i = 0; i < ins.size(); i++) put(outs[i], folded(c.rows(ins[i]).chunk(c.size, 1)[c.rank], op));
    });
  }
  Began alltoall(Tensors& outs, Tensors& ins, const AllToAllOptions& o) override {
    std::vector<Move> moves;
    for (int each = 0; each < size_; each++) {
      moves.push_back({true, each, raw(ins[each]), ins[each].nbytes()});
      moves.push_back({false, each, raw(outs[each]), outs[each].nbytes()});
    }
    return begin(OpType::ALLTOALL, outs, ins, o.asyncOp, nullptr, moves);
  }
  Began alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& of_out, std::vector<int64_t>& of_in, const AllToAllOptions& o) override {
    auto cut = [&](at::Tensor& t, std::vector<int64_t>& sizes) { return sizes.empty() ? t.chunk(size_) : t.split_with_sizes(sizes); };
    auto outs = cut(out, of_out), ins = cut(in, of_in);
    return alltoall(outs, ins, o);
  }
  Began barrier(const BarrierOptions& o) override {
    return begin(OpType::BARRIER, {}, {}, o.asyncOp, [](Comm& c) { c.rows(at::zeros(1)); });
  }
  Began send(Tensors& ts, int peer, int) override { return begin(OpType::SEND, {}, ts, true, nullptr, {{true, peer, raw(ts.at(0)), ts[0].nbytes()}}); }
  Began recv(Tensors& ts, int peer, int) override { return begin(OpType::RECV, ts, {}, true, nullptr, {{false, peer, raw(ts.at(0)), ts[0].nbytes()}}); }

 private:
  c10::intrusive_ptr<Store> store_;
  shared_ptr<Comm> comm_;
  bool coalesced_ = false;
  pid_t pid_ = getpid();

  static void put(const at::Tensor& out, const at::Tensor& found) { out.copy_(found.reshape(out.sizes())); }
  static void put(const Tensors& outs, const at::Tensor& rows) { for (size_t i = 0; i < outs.size(); i++) put(outs[i], rows[i]); }
  static at::Tensor folded(const at::Tensor& rows, ReduceOp op) {
    if (op == ReduceOp::SUM) return rows.sum(0, false, rows.scalar_type());
    if (op == ReduceOp::AVG) return rows.sum(0, false, rows.scalar_type()).div_(rows.size(0));
    if (op == ReduceOp::MIN) return rows.amin(0);
    if (op == ReduceOp::MAX) return rows.amax(0);
    TORCH_CHECK(op == ReduceOp::PRODUCT, "likenccl: no such reduction");
    return rows.prod(0, false, rows.scalar_type());
  }
  Began summed(Tensors& ts, ReduceOp op, int root, bool async) {
    return begin(OpType::ALLREDUCE, root < 0 || root == rank_ ? ts : Tensors{}, ts, async, [ts, op, root](Comm& c) {
      for (auto& each : ts)
        if (auto rows = c.rows(each); root < 0 || root == c.rank) put(each, folded(rows, op));
    });
  }
  // Without `run` it is a send or a receive.
  Began begin(OpType type, Tensors outputs, Tensors inputs, bool async, std::function<void(Comm&)> run, std::vector<Move> moves = {}) {
    Inside within(*comm_);
    if (linger_us) nap(linger_us);
    if (comm_->aborted) C10_THROW_ERROR(DistBackendError, "NCCL communicator was aborted on rank " + std::to_string(rank_) + ".");
    if (comm_->cut) invalid("this communicator was revoked");
    comm_->connected();
    auto op = std::make_shared<Op>();
    op->outputs = outputs, op->inputs = inputs;
    for (auto* tensors : {&outputs, &inputs}) for (auto& each : *tensors) op->touched.insert(memory(each));
    if (run) op->run = [run, comm = comm_.get()] { run(*comm); };
    auto work = c10::make_intrusive<LikeWork>(rank_, type, Ops{op}, outputs);
    coalesced_ = true;
    if (depth) {                                     // it is launched as the group ends; its event comes at once
      calls.push_back({comm_, op, moves});
      work->ops.clear();
      return work;
    }
    launch({comm_, op, moves});
    if (async) return work;
    work->synchronize();
    return nullptr;
  }
};

struct Event {
  Ops ops;
  void record() { ops = now_ordered(); }
  bool query() { return std::all_of(ops.begin(), ops.end(), [](auto& op) { return op->done.load(); }); }
};

// Called before every operator of every thread: what touches memory that a kernel does comes later than that.
bool touches(const c10::IValue& value, const Op& op) {
  if (value.isTensorList()) return std::ranges::any_of(value.toTensorVector(), [&](auto& each) { return touches(each, op); });
  return value.isTensor() && value.toTensor().defined() && op.touched.contains(memory(value.toTensor()));
}
std::unique_ptr<at::ObserverContext> before(const at::RecordFunction& function) {
  if (!waiting || is_stream) return nullptr;
  string name = function.name();
  for (auto each : {"c10d::", "aten::empty", "aten::view", "aten::detach", "aten::alias", "aten::as_strided"})
    if (name.starts_with(each)) return nullptr;      // these only look at where it is
  auto ops = now_ordered();
  std::erase_if(ops, [&](auto& op) {
    return std::ranges::none_of(function.inputs(), [&](auto& each) { return touches(each, *op); });
  });
  until_done(ops);
  return nullptr;
}

Comm* known(void* pointer) {
  std::lock_guard held(lock);
  if (!living.contains(static_cast<Comm*>(pointer))) fatal("a communicator is used that was freed");
  return static_cast<Comm*>(pointer);
}
}  // namespace

#define NCCL extern "C" __attribute__((visibility("default")))
NCCL int ncclGetVersion(int* version) { *version = 23007; return SUCCESS; }
NCCL const char* ncclGetErrorString(int code) { return code == 6 ? "remote process exited or there was a network error" : "another error"; }
NCCL int ncclCommGetAsyncError(void* comm, int* error) { *error = known(comm)->error; return SUCCESS; }
NCCL int ncclCommRevoke(void* comm, int) { known(comm)->cut = true; changed.notify_all(); return IN_PROGRESS; }
NCCL int ncclGroupEnd() { Ops ops; return group_end(ops); }
NCCL void likenccl_fail(void* comm, int error) { known(comm)->error = error; }
NCCL void likenccl_linger(int us) { linger_us = us; }

PYBIND11_MODULE(_likenccl, m) {
  py::class_<LikeNccl, c10::intrusive_ptr<LikeNccl>, Backend>(m, "ProcessGroupLikeNccl")
      .def(py::init<c10::intrusive_ptr<Store>, int, int, bool>())
      .def("_comm_ptr", &LikeNccl::pointer);
  py::class_<Event>(m, "Event").def(py::init<>()).def("record", &Event::record).def("query", &Event::query);
  at::addGlobalCallback(at::RecordFunctionCallback(&before).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}
