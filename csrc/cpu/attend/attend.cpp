//     task i:  O_i = sum_t 2^(s_t - m_i) v_t,  l_i = sum_t 2^(s_t - m_i),  m_i = max_t s_t
//     merge:   m = max m_i,  out = sum_i 2^(m_i - m) O_i / l,  l = sum_i 2^(m_i - m) l_i,  lse = (m + log2 l) ln 2
//
// The driver: page lists, tasks, and the merge of their results.
//
// A task is one KV head of one request and up to ROWS, or MANY_ROWS, of its query rows (queries x query heads of the KV
// head, in that order), over a run of packed pages or over the full-precision tokens. Whoever finishes the last task of
// a (request, head, row block) merges, so a single parallel loop does everything.
#include "attend.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "../dispatch/isa.h"
#include "../hadamard.h"
#include "../half.h"
#include "../scratch.h"
#include "../threads.h"

namespace kvq {
namespace {

constexpr float LN_2 = 0.69314718056f;
constexpr int64_t TASKS_PER_THREAD = 8; // so that a late thread costs little
constexpr int64_t MIN_TASK_TOKENS = 512;
constexpr int64_t MANY_ROWS = 1024;     // for a task that unpacks its pages, or gathers its tokens, once for all rows

struct Share : RowBlock {
  int64_t first_task, tasks;
};

struct Piece {  // one task
  int64_t share, first, count;  // pages [first, first + count) of the sorted list; count 0: full-precision tokens
  int64_t partial;              // floats into the buffer of partial results
};

void write(void* to, Dtype dtype, int64_t at, const float* x, int64_t n) {
  if (dtype == Dtype::f32) return void(std::copy_n(x, n, static_cast<float*>(to) + at));
  uint16_t* out = static_cast<uint16_t*>(to) + at;
  if (dtype == Dtype::f16)
    for (int64_t c = 0; c < n; ++c) out[c] = float_to_half(x[c]);
  else
    for (int64_t c = 0; c < n; ++c) out[c] = float_to_bfloat(x[c]);
}

class Driver {
 public:
  explicit Driver(const Attend& a)
      : a_(a),
        p_(a.packed),
        list_(a.packed.list),
        l_(a.packed.layout),
        kernels_(isa(a.team.isa).attend),
        many_kernel_(many_kernel(a.team.isa, a.query_dtype)),
        d_((a.head_size + SLAB - 1) / SLAB * SLAB),
        group_(a.query_heads / a.heads),
        rows_(a.queries * group_),
        many_(list_.count && rows_ >= many_kernel_.rows(l_)),
        block_rows_(many_ || !list_.count ? even_blocks() : ROWS) {}

  void run() {
    sort_pages();
    check_rows();
    if (rows_ == 0 || a_.requests == 0) return;
    places_ = locate_raw(a_);
    plan();
    partial_.reset(new float[partial_size_]);
    left_.reset(new std::atomic<int64_t>[shares_.size()]);
    for (size_t i = 0; i < shares_.size(); ++i) left_[i] = shares_[i].tasks;
    if (list_.count && !many_ && projected(l_)) project_queries();
    parallel(a_.team.threads, int64_t(pieces_.size()), [&](int64_t i) { work(pieces_[i]); });
  }

 private:
  // A multiple of ROWS: at most MANY_ROWS, and few enough that every thread has a task.
  int64_t even_blocks() const {
    const int64_t fair = (rows_ * a_.heads * a_.requests + 2 * a_.team.threads - 1) / (2 * a_.team.threads);
    const int64_t most = std::clamp<int64_t>(a_.team.threads > 1 ? fair : MANY_ROWS, ROWS, MANY_ROWS);
    const int64_t blocks = std::max<int64_t>((rows_ + most - 1) / most, 1), each = (rows_ + blocks - 1) / blocks;
    return std::max<int64_t>((each + ROWS - 1) / ROWS * ROWS, ROWS);
  }

  // The list by request, in the order given, without empty ranges; all indices checked.
  void sort_pages() {
    first_page_.assign(a_.requests + 1, 0);
    for (int64_t i = 0; i < list_.count; ++i) {
      if (list_.ids[i] < 0 || list_.ids[i] >= p_.pool.pages)
        throw std::out_of_range("page id " + std::to_string(list_.ids[i]) + " is not one of " +
                                std::to_string(p_.pool.pages) + " pages");
      if (list_.owner[i] < 0 || list_.owner[i] >= a_.requests)
        throw std::out_of_range("owner " + std::to_string(list_.owner[i]) + " is not one of " +
                                std::to_string(a_.requests) + " requests");
      if (low(i) < high(i)) ++first_page_[list_.owner[i] + 1];
    }
    for (int64_t r = 0; r < a_.requests; ++r) first_page_[r + 1] += first_page_[r];
    order_.resize(first_page_[a_.requests]);
    std::vector<int64_t> at(first_page_.begin(), first_page_.end() - 1);
    for (int64_t i = 0; i < list_.count; ++i)
      if (low(i) < high(i)) order_[at[list_.owner[i]]++] = i;
  }

  void check_rows() const {
    const int64_t limit = a_.raw.pool.rows() + a_.raw.more.rows();
    for (int64_t i = 0; i < a_.requests * a_.raw.tokens; ++i)
      if (a_.raw.rows[i] >= limit)
        throw std::out_of_range("row " + std::to_string(a_.raw.rows[i]) + " is not one of " + std::to_string(limit) +
                                " rows");
    for (int64_t i = 0; a_.out_rows && i < a_.requests * a_.queries; ++i)
      if (a_.out_rows[i] < 0 || a_.out_rows[i] >= a_.out_count)
        throw std::out_of_range("output row " + std::to_string(a_.out_rows[i]) + " is not one of " +
                                std::to_string(a_.out_count));
  }

  int64_t low(int64_t i) const { return std::max<int64_t>(list_.low[i], 0); }
  int64_t high(int64_t i) const { return std::min<int64_t>(list_.high[i], l_.tokens); }

  void plan() {
    const int64_t blocks = (rows_ + block_rows_ - 1) / block_rows_;
    const int64_t total = int64_t(order_.size()) * a_.heads * blocks;
    const int64_t wanted = a_.team.threads > 1 ? a_.team.threads * TASKS_PER_THREAD : 1;
    const int64_t least = list_.count ? std::max<int64_t>(1, MIN_TASK_TOKENS / l_.tokens) : 1;
    const int64_t most = std::max(least, (total + wanted - 1) / wanted);
    for (int64_t request = 0; request < a_.requests; ++request) {
      const int64_t first = first_page_[request], pages = first_page_[request + 1] - first;
      const int64_t splits = (pages + most - 1) / most, raw = a_.raw.tokens > 0;
      for (int64_t head = 0; head < a_.heads; ++head)
        for (int64_t row = 0; row < rows_; row += block_rows_) {
          const int64_t share = int64_t(shares_.size()), rows = std::min(block_rows_, rows_ - row);
          shares_.push_back({{request, head, row, rows}, int64_t(pieces_.size()), splits + raw});
          for (int64_t s = 0; s < splits; ++s) {
            const int64_t from = pages * s / splits, to = pages * (s + 1) / splits;
            pieces_.push_back({share, first + from, to - from, partial_size_});
            partial_size_ += rows * (d_ + 2);
          }
          if (raw) {
            pieces_.push_back({share, 0, 0, partial_size_});
            partial_size_ += rows * (d_ + 2);
          }
          if (!(splits + raw)) merge(shares_.back());
        }
    }
  }

  // Row r of a KV head is query r / group, query head head * group + r % group.
  int64_t output_row(int64_t request, int64_t head, int64_t r) const {
    return (request * a_.queries + r / group_) * a_.query_heads + head * group_ + r % group_;
  }

  // Times `factor`.
  void read_query(int64_t request, int64_t head, int64_t r, float factor, float* to) const {
    const int64_t at = request * a_.query_strides[0] + r / group_ * a_.query_strides[1] +
                       (head * group_ + r % group_) * a_.query_strides[2];
    for (int64_t c = 0; c < l_.head_size; ++c) {
      float x;
      if (a_.query_dtype == Dtype::f32)
        x = static_cast<const float*>(a_.query)[at + c];
      else if (a_.query_dtype == Dtype::f16)
        x = half_or_nan(static_cast<const uint16_t*>(a_.query)[at + c]);
      else
        x = bfloat_to_float(static_cast<const uint16_t*>(a_.query)[at + c]);
      // as formats/parts/quant.py does: NaN is 0, everything else within +-LIMIT
      x = x != x ? 0.0f : std::min(std::max(x, -float(LIMIT)), float(LIMIT));
      to[c] = x * factor;
    }
    std::fill(to + l_.head_size, to + l_.d, 0.0f);
  }

  float unit() const { return a_.scores.scale * LOG2_E; }

  // The features of all shares, each with room for the rows of the longest. Several shares at once if all heads have the
  // same S (QJL): a float of it then meets more rows while it is in a register.
  void project_queries() {
    constexpr int64_t TOGETHER = 16;  // rows
    const int64_t shares = int64_t(shares_.size()), fair = std::max<int64_t>(shares / a_.team.threads, 1);
    const bool alike = l_.keys == Keys::sketch;
    const int64_t step = alike ? std::clamp<int64_t>(TOGETHER / share_rows(), 1, fair) : 1;
    features_.reset(new float[shares * share_rows() * projected(l_)]);
    parallel(a_.team.threads, (shares + step - 1) / step, [&](int64_t i) {
      thread_local Scratch scratch;
      const int64_t first = i * step, last = std::min(first + step, shares), rows = (last - first) * share_rows();
      float* query = reinterpret_cast<float*>(scratch.reserve(4 * rows * l_.d));
      for (int64_t r = 0; r < rows; ++r) {
        const Share& s = shares_[first + r / share_rows()];
        read_query(s.request, s.head, s.row + std::min(r % share_rows(), s.rows - 1), unit(), query + r * l_.d);
      }
      kernels_.project(l_, of_head(p_.constants, l_, shares_[first].head), query, int(rows), features_of(first));
    });
  }

  int64_t share_rows() const { return std::min(block_rows_, rows_); }
  float* features_of(int64_t share) const {
    return features_ ? features_.get() + share * share_rows() * projected(l_) : nullptr;
  }

  void work(const Piece& piece) {
    const Share& share = shares_[piece.share];
    float* out = partial_.get() + piece.partial;
    if (piece.count)
      pages(piece, share, out);
    else
      raw(share, out);
    if (left_[piece.share].fetch_sub(1) == 1) merge(share);
  }

  void raw(const Share& s, float* out) const {
    thread_local Scratch scratch;
    float* work = reinterpret_cast<float*>(scratch.reserve(4 * size_t(raw_work_floats(s.rows, d_))));
    float* top = out + s.rows * d_;
    const Place* places = places_.data() + s.request * a_.raw.tokens;
    attend_raw_rows(a_, places, s, {out, top, top + s.rows}, work);
  }

  void pages(const Piece& piece, const Share& share, float* out) const {
    thread_local Scratch scratch;
    const int rows = int(share.rows);
    const KeyKernel keys = many_ ? KeyKernel{} : key_kernel(a_.team.isa, l_, rows);
    const ValueKernel values = many_ ? ValueKernel{} : value_kernel(a_.team.isa, l_, rows);
    const bool tiles = keys.tiles || values.tiles;
    const size_t key_bytes = many_ ? many_kernel_.work_bytes(l_, rows) : keys.work_bytes(l_);
    const bool scaled = !many_ || many_kernel_.scaled;
    const size_t value_bytes = many_ ? 0 : values.work_bytes(l_);
    char* memory = scratch.reserve(key_bytes + value_bytes + 4 * (block_rows_ * l_.d + ROWS * BLOCK));
    float* query = reinterpret_cast<float*>(memory + key_bytes + value_bytes);
    Slabs slabs(*this, share.head, piece.first, piece.first + piece.count);
    Slab block[BLOCK_SLABS], ahead[BLOCK_SLABS];
    int next = slabs.take(ahead);
    // no kernel has prefetched the first block
    Prefetch{nullptr, nullptr, ahead, ahead + next, l_.slab_bytes}.everything();
    for (int r = 0; r < rows; ++r)
      read_query(share.request, share.head, share.row + r, scaled ? unit() : 1.0f, query + r * l_.d);

    const Constants constants = of_head(p_.constants, l_, share.head);
    Task task{};
    task.layout = &l_;
    task.constants = &constants;
    task.rows = rows;
    task.unit = scaled ? 1.0f : unit();
    task.cap = a_.scores.cap * LOG2_E;
    task.query = query;
    task.features = features_of(piece.share);
    task.scores = query + block_rows_ * l_.d;
    task.out = out;
    task.top = task.out + rows * l_.d;
    task.total = task.top + rows;
    task.key_work = memory;
    task.value_work = memory + key_bytes;
    std::fill(task.out, task.top, 0.0f);
    std::fill(task.top, task.total, -1e30f);
    std::fill(task.total, task.total + rows, 0.0f);

    if (tiles) begin_tiles(l_, rows);
    many_ ? many_kernel_.begin(task) : keys.begin(task);
    while (int count = next) {
      std::copy_n(ahead, count, block);
      next = slabs.take(ahead);
      if (many_) {
        many_kernel_.attend(task, block, count);
        continue;
      }
      task.prefetch = {nullptr, nullptr, ahead, ahead + next, l_.slab_bytes};
      keys.score(task, block, count);
      if (task.cap > 0) kernels_.cap(task.scores, BLOCK, rows, count * SLAB, task.cap);
      kernels_.softmax(task, block, count);
      values.add(task, block, count);
    }
    if (tiles) end_tiles();
    if (l_.value_rotated) rotate_back(task);
  }

  // Rotated values add up to rotated outputs, so a row is rotated once, not every token. The reference clamps each token
  // that it rotates back (formats/methods/values.py), which a sum can't undo; a mean of clamped tokens is within the same
  // limit, so that is what the sum of all weights times the limit bounds here. For one token it is the same.
  void rotate_back(const Task& task) const {
    for (int r = 0; r < task.rows; ++r) {
      float* row = task.out + r * l_.d;
      hadamard(row, l_.d);
      const float most = LIMIT * task.total[r];
      for (int64_t c = 0; c < l_.d; ++c) row[c] = std::min(std::max(row[c], -most), most);
    }
  }

  // The attended slabs of a run of pages, in blocks.
  class Slabs {
   public:
    Slabs(const Driver& driver, int64_t head, int64_t first, int64_t last)
        : driver_(driver), head_(head), page_(first), last_(last) {
      if (page_ < last_) open();
    }

    int take(Slab* block) {
      int count = 0;
      while (count < BLOCK_SLABS && page_ < last_) {
        const int64_t start = slab_ * SLAB;
        block[count++] = {record_, record_ + driver_.l_.slabs_at + slab_ * driver_.l_.slab_bytes, int(slab_),
                          int(std::max<int64_t>(low_ - start, 0)), int(std::min<int64_t>(high_ - start, SLAB))};
        if (++slab_ * SLAB >= high_ && ++page_ < last_) open();
      }
      return count;
    }

   private:
    void open() {
      const Pool& pool = driver_.p_.pool;
      const int64_t i = driver_.order_[page_];
      record_ = pool.records + driver_.list_.ids[i] * pool.page_stride + head_ * pool.head_stride;
      low_ = driver_.low(i);
      high_ = driver_.high(i);
      slab_ = low_ / SLAB;
    }

    const Driver& driver_;
    int64_t head_, page_, last_;
    const uint8_t* record_ = nullptr;
    int64_t low_ = 0, high_ = 0, slab_ = 0;
  };

  void merge(const Share& share) const {
    float out[LARGEST_HEAD];
    for (int64_t r = 0; r < share.rows; ++r) {
      const int64_t row = output_row(share.request, share.head, share.row + r), n = a_.head_size;
      const auto part = [&](int64_t i) { return partial_.get() + pieces_[share.first_task + i].partial; };
      const auto top_of = [&](int64_t i) { return part(i)[share.rows * d_ + r]; };
      const auto total_of = [&](int64_t i) { return part(i)[share.rows * (d_ + 1) + r]; };
      float top = -1e30f, total = 0;
      for (int64_t i = 0; i < share.tasks; ++i) top = std::max(top, top_of(i));
      for (int64_t i = 0; i < share.tasks; ++i) total += std::exp2(top_of(i) - top) * total_of(i);
      if (a_.lse) a_.lse[row] = total > 0 ? (top + std::log2(total)) * LN_2 : -INFINITY;

      // a prior part is one with the maximum l / ln 2 and the sum 1
      float high = top, prior[2] = {-INFINITY, -INFINITY};
      for (int i = 0; i < 2; ++i)
        if (a_.prior_lse[i]) high = std::max(high, prior[i] = a_.prior_lse[i][row] * LOG2_E);
      total *= std::exp2(top - high);
      for (int i = 0; i < 2; ++i) total += std::exp2(prior[i] - high);
      const float inverse = total > 0 ? 1 / total : 0.0f;
      std::fill_n(out, n, 0.0f);
      for (int64_t i = 0; i < share.tasks; ++i) {
        const float weight = std::exp2(top_of(i) - high) * inverse, *x = part(i) + r * d_;
        for (int64_t c = 0; c < n; ++c) out[c] += weight * x[c];
      }
      for (int i = 0; i < 2; ++i) {
        const float weight = std::exp2(prior[i] - high) * inverse;
        if (weight == 0) continue;
        for (int64_t c = 0; c < n; ++c) out[c] += weight * a_.prior_out[i][row * n + c];
      }
      const int64_t line = row / a_.query_heads, to = a_.out_rows ? a_.out_rows[line] : line;
      write(a_.out, a_.out_dtype, to * a_.out_strides[0] + row % a_.query_heads * a_.out_strides[1], out, n);
    }
  }

  const Attend& a_;
  const Packed& p_;
  const PageList& list_;
  const Layout& l_;
  const AttendKernels& kernels_;
  const ManyKernel& many_kernel_;
  const int64_t d_, group_, rows_;
  const bool many_;
  const int64_t block_rows_;
  std::vector<int64_t> first_page_, order_;
  std::vector<Share> shares_;
  std::vector<Piece> pieces_;
  std::vector<Place> places_;
  int64_t partial_size_ = 0;
  std::unique_ptr<float[]> partial_, features_;
  std::unique_ptr<std::atomic<int64_t>[]> left_;
};

}  // namespace

void attend(const Attend& a) { Driver(a).run(); }

}  // namespace kvq
