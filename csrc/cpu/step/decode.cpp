// With context c, q new tokens, and the first own position `start` of a request (kernels/torch/plan.py):
//
//     boundary   B = max(floor((c - W) / P) P, start, 0): history below B is read packed, from B on from the ring
//     sinks      positions below min(S, B) come from the sink pages
//     packing    units that end in (c, c + q]; those of a prefix hit end at `start`, before c
//     ring       position p lies in slot p mod R
#include "decode.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "../attend/attend.h"
#include "../pack/pack.h"

namespace kvq {
namespace {

struct Request {
  int64_t index, first_row, queries, context, start, boundary, sinks;

  int64_t end() const { return context + queries; }
};

int64_t within(int64_t id, int64_t limit, const char* what) {
  if (id < 0 || id >= limit)
    throw std::out_of_range(std::string(what) + " " + std::to_string(id) + " is not one of " + std::to_string(limit));
  return id;
}

class Decoder {
 public:
  explicit Decoder(const Decode& d) : d_(d), c_(d.cut), size_(d.dtype == Dtype::f32 ? 4 : 2) {}

  int64_t run() {
    if (!read_requests()) return NOT_DECODING;
    if (requests_.empty()) return 0;
    plan_attention();  // checks every id before anything is written
    const int64_t replaced = d_.update ? update() : 0;
    for (const Group& group : groups_) attend_group(group);
    return replaced;
  }

 private:
  struct Group {  // requests with the same number of new tokens
    int64_t queries = 0, tokens = 0;
    std::vector<const Request*> members;
    std::vector<int64_t> page_ids, owner, low, high, rows, out_rows;
    std::vector<uint8_t> seen;
  };

  int64_t update() {
    plan_units();
    plan_stores();
    const int64_t replaced = unit_.empty() ? 0 : pack_units();
    store(d_.side, ring_to_, ring_from_);
    store(d_.sink, sink_to_, sink_from_);
    for (const Request& r : requests_) *header(r.index) = {SIDE_MAGIC, int32_t(r.start), int32_t(r.end())};
    return replaced;
  }

  // -- the batch --------------------------------------------------------------------------------------------------
  SideHeader* header(int64_t request) const {
    const int64_t block = within(d_.side_of.at(request, 0), d_.side.blocks, "sidecar block");
    return reinterpret_cast<SideHeader*>(d_.side_blocks + block * d_.side_stride + c_.header_at);
  }

  bool read_requests() {
    for (int64_t i = 0; i < d_.requests; ++i) {
      const int64_t first = d_.query_start[i], q = d_.query_start[i + 1] - first;
      // padding, and vLLM's dummy runs
      if (q <= 0 || d_.side_of.at(i, 0) == 0) continue;
      if (q > 1 + c_.drafts) return false;
      for (int64_t b = 0; b < c_.blocks; ++b)
        if (d_.side_of.at(i, b) == 0) throw std::runtime_error("a request has an incomplete sidecar");
      const SideHeader h = *header(i);
      if (h.magic == 0) return false;
      const int64_t context = d_.seq_lens[i] - q;
      if (context < 0) throw std::out_of_range("a request has more new tokens than tokens");
      // rejected drafts are written again; after an update the header is this step's
      const int64_t rewound = h.next - (d_.update ? context : context + q), most = d_.update ? c_.drafts : 0;
      if (h.magic != SIDE_MAGIC || rewound < 0 || rewound > most || h.start < 0 || h.start > context) {
        std::ostringstream text;
        text << "stale sidecar: magic 0x" << std::hex << h.magic << std::dec << ", positions from " << h.start
             << ", next position " << h.next << ", but " << context << " tokens are computed";
        throw std::runtime_error(text.str());
      }
      if (h.start % c_.unit)
        throw std::runtime_error("a prefix hit resumes at " + std::to_string(h.start) + ", not at a multiple of " +
                                 std::to_string(c_.unit) + " tokens");
      if (first < 0 || first + q > d_.tokens) throw std::out_of_range("a request's rows leave the step's tokens");
      const int64_t old = context < c_.window ? 0 : (context - c_.window) / c_.unit * c_.unit;
      const int64_t boundary = std::max<int64_t>({old, h.start, 0});
      requests_.push_back({i, first, q, context, h.start, boundary, std::min(c_.sinks, boundary)});
    }
    return true;
  }

  // -- where things lie -------------------------------------------------------------------------------------------
  int64_t slot_row(const Table& table, const Tokens& pool, int64_t request, int64_t slot, const char* what) const {
    const int64_t block = within(table.at(request, slot / c_.slots_per_block), pool.blocks, what);
    return block * c_.slots_per_block + slot % c_.slots_per_block;
  }

  int64_t ring_row(const Request& r, int64_t position) const {
    return slot_row(d_.side_of, d_.side, r.index, c_.ring_at + position % c_.ring, "sidecar block");
  }

  int64_t sink_row(const Request& r, int64_t position) const {
    return slot_row(d_.sinks_of, d_.sink, r.index, position, "sink block");
  }

  int64_t page_of(const Request& r, int64_t page) const {
    return within(d_.pages_of.at(r.index, page), d_.pool.pages, "page id");
  }

  // -- planning ---------------------------------------------------------------------------------------------------
  void plan_attention() {
    for (const Request& r : requests_) {
      auto same = std::find_if(groups_.begin(), groups_.end(), [&](const Group& g) { return g.queries == r.queries; });
      if (same == groups_.end()) same = groups_.insert(groups_.end(), Group{});
      same->queries = r.queries;
      same->members.push_back(&r);
      same->tokens = std::max(same->tokens, r.sinks + r.end() - r.boundary);
    }
    for (Group& g : groups_) {
      const int64_t n = int64_t(g.members.size());
      g.rows.assign(n * g.tokens, -1);
      g.seen.assign(n * g.queries * g.tokens, 0);
      for (int64_t i = 0; i < n; ++i) {
        const Request& r = *g.members[i];
        list_pages(g, r, i);
        list_tokens(r, &g.rows[i * g.tokens], &g.seen[i * g.queries * g.tokens], g.tokens);
        for (int64_t j = 0; j < r.queries; ++j) g.out_rows.push_back(r.first_row + j);
      }
    }
  }

  void list_pages(Group& g, const Request& r, int64_t owner) const {
    const int64_t n = d_.layout.tokens;
    for (int64_t page = c_.sinks / n; r.boundary > c_.sinks && page * n < r.boundary; ++page) {
      g.page_ids.push_back(page_of(r, page));
      g.owner.push_back(owner);
      g.low.push_back(std::max<int64_t>(c_.sinks - page * n, 0));
      g.high.push_back(std::min<int64_t>(r.boundary - page * n, n));
    }
  }

  // Sinks, then the ring with the new tokens in it. History is seen by every query, a new token by itself and the
  // later ones.
  void list_tokens(const Request& r, int64_t* rows, uint8_t* seen, int64_t stride) const {
    for (int64_t j = 0; j < r.sinks; ++j) rows[j] = d_.side.rows() + sink_row(r, j);
    const int64_t count = r.sinks + r.end() - r.boundary;
    for (int64_t j = r.sinks; j < count; ++j) rows[j] = ring_row(r, r.boundary + j - r.sinks);
    for (int64_t q = 0; q < r.queries; ++q) std::fill_n(seen + q * stride, count - (r.queries - 1 - q), uint8_t(1));
  }

  void plan_units() {
    const int64_t p = c_.unit, per_page = d_.layout.tokens / p;
    for (const Request& r : requests_) {
      const int64_t first = r.context / p, last = r.end() / p;
      if (first >= last) continue;
      for (int64_t u = first; u < last; ++u) {
        page_.push_back(page_of(r, u / per_page));
        unit_.push_back(u % per_page);
        position_.push_back(u * p);
        owner_.push_back(int64_t(owners_.size()));
        follows_.push_back(u / per_page * per_page < first);  // the page's first unit was packed in an earlier step
        for (int64_t at = u * p; at < (u + 1) * p; ++at)
          rows_.push_back(at < r.context ? ring_row(r, at) : d_.side.rows() + r.first_row + at - r.context);
      }
      owners_.push_back(&r);
    }
  }

  void plan_stores() {
    for (const Request& r : requests_)
      for (int64_t at = r.context; at < r.end(); ++at) {
        const int64_t from = r.first_row + at - r.context;
        ring_to_.push_back(ring_row(r, at));
        ring_from_.push_back(from);
        if (r.start == 0 && at < c_.sinks) {
          sink_to_.push_back(sink_row(r, at));
          sink_from_.push_back(from);
        }
      }
  }

  // -- doing ------------------------------------------------------------------------------------------------------
  int64_t pack_units() const {
    Pack p{};
    p.layout = d_.layout;
    p.constants = d_.constants;
    p.pool = d_.pool;
    p.units = {int64_t(unit_.size()), c_.unit, page_.data(), unit_.data(),
               rows_.data(), owner_.data(), follows_.data(), position_.data()};
    p.old = d_.side;
    p.fresh = d_.fresh;
    p.dtype = d_.dtype;
    const std::vector<float> state = read_states();
    p.state = state.empty() ? nullptr : state.data();
    p.owners = int64_t(owners_.size());
    p.state_rows = c_.state_rows;
    p.team = d_.team;
    return pack(p);
  }

  // The owners' states, (owners, heads, state_rows, d): they fill the sidecar's slots from state_at on.
  std::vector<float> read_states() const {
    const int64_t floats = d_.pool.heads * c_.state_rows * d_.layout.d;
    const int64_t slot_bytes = 2 * d_.pool.heads * d_.layout.head_size * size_;
    std::vector<float> states(owners_.size() * floats);
    for (size_t i = 0; i < owners_.size(); ++i) {
      char* to = reinterpret_cast<char*>(states.data() + i * floats);
      for (int64_t done = 0, slot = c_.state_at; done < 4 * floats; done += slot_bytes, ++slot) {
        const int64_t row = slot_row(d_.side_of, d_.side, owners_[i]->index, slot, "sidecar block");
        std::memcpy(to + done,
                    d_.side_blocks + row / c_.slots_per_block * d_.side_stride + row % c_.slots_per_block * slot_bytes,
                    std::min(slot_bytes, 4 * floats - done));
      }
    }
    return states;
  }

  void store(const Tokens& to, const std::vector<int64_t>& rows, const std::vector<int64_t>& from) const {
    if (rows.empty()) return;
    kvq::store({to, d_.fresh, d_.pool.heads, d_.layout.head_size, int64_t(rows.size()), d_.dtype, rows.data(), from.data()});
  }

  void attend_group(const Group& g) const {
    Attend a{};
    a.requests = int64_t(g.members.size());
    a.queries = g.queries;
    a.query_heads = d_.query_heads;
    a.head_size = d_.layout.head_size;
    a.heads = d_.pool.heads;
    std::vector<char> copy;
    read_queries(a, g, copy);
    const int64_t pages = int64_t(g.page_ids.size());
    const PageList list{pages, g.page_ids.data(), g.owner.data(), g.low.data(), g.high.data()};
    if (unpacked_page(d_.layout, d_.pool, list) >= 0)
      throw std::runtime_error("a page that was never packed would have been read");
    a.packed = {d_.layout, d_.constants, d_.pool, list};
    a.raw = {d_.side, d_.sink, d_.dtype, g.tokens, g.rows.data(), g.seen.data()};
    a.scores = d_.scores;
    a.out = d_.out;
    a.out_dtype = d_.out_dtype;
    a.out_count = d_.tokens;
    std::copy_n(d_.out_strides, 2, a.out_strides);
    a.out_rows = g.out_rows.data();
    a.team = d_.team;
    attend(a);
  }

  // In place if the group's rows are one run of the step's tokens, else a copy.
  void read_queries(Attend& a, const Group& g, std::vector<char>& copy) const {
    const int64_t row = d_.query_heads * d_.layout.head_size;
    bool run = true;
    for (size_t i = 1; i < g.out_rows.size(); ++i) run = run && g.out_rows[i] == g.out_rows[i - 1] + 1;
    a.query_dtype = d_.dtype;
    int64_t strides[2] = {d_.query_strides[0], d_.query_strides[1]};
    const char* query = static_cast<const char*>(d_.query);
    if (run) {
      a.query = query + g.out_rows[0] * strides[0] * size_;
    } else {
      copy.resize(g.out_rows.size() * row * size_);
      for (size_t i = 0; i < g.out_rows.size(); ++i)
        for (int64_t h = 0; h < d_.query_heads; ++h)
          std::memcpy(&copy[(i * row + h * d_.layout.head_size) * size_],
                      query + (g.out_rows[i] * strides[0] + h * strides[1]) * size_, d_.layout.head_size * size_);
      a.query = copy.data();
      strides[0] = row;
      strides[1] = d_.layout.head_size;
    }
    a.query_strides[0] = g.queries * strides[0];
    a.query_strides[1] = strides[0];
    a.query_strides[2] = strides[1];
  }

  const Decode& d_;
  const Companions& c_;
  const int64_t size_;
  std::vector<Request> requests_;
  std::vector<Group> groups_;
  std::vector<int64_t> page_, unit_, rows_, owner_, position_, ring_to_, ring_from_, sink_to_, sink_from_;
  std::vector<uint8_t> follows_;
  std::vector<const Request*> owners_;
};

}  // namespace

int64_t decode(const Decode& d) { return Decoder(d).run(); }

}  // namespace kvq
