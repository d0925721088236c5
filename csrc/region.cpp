// Regions as lists of disjoint boxes: made of tiles or rectangles, united, widened, and brought up a level.
#include "tiles.h"

namespace texvlm {

using at::Tensor;

namespace {

struct Span {
  int64_t x0, x1;
};

// Sorted, and those that touch as one.
void merge(std::vector<Span>& spans) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.x0 < b.x0; });
  size_t count = 0;
  for (const Span& s : spans) {
    if (count > 0 && s.x0 <= spans[count - 1].x1) {
      spans[count - 1].x1 = std::max(spans[count - 1].x1, s.x1);
    } else {
      spans[count++] = s;
    }
  }
  spans.resize(count);
}

// Goes down a picture's rows: which boxes, sorted by y0, are on the rows from y on.
class Sweep {
 public:
  Sweep(const Box* begin, const Box* end) : next_(begin), end_(end) {}
  const std::vector<Span>& spans_at(int64_t y) {
    active_.erase(std::remove_if(active_.begin(), active_.end(), [&](const Box* box) { return box->y1 <= y; }), active_.end());
    for (; next_ != end_ && next_->y0 <= y; ++next_) active_.push_back(next_);
    spans_.clear();
    for (const Box* box : active_) spans_.push_back({box->x0, box->x1});
    merge(spans_);
    return spans_;
  }

 private:
  const Box *next_, *end_;
  std::vector<const Box*> active_;
  std::vector<Span> spans_;
};

bool equal(const std::vector<Span>& spans, const Box* boxes, size_t count) {
  if (spans.size() != count) return false;
  for (size_t i = 0; i < count; ++i)
    if (spans[i].x0 != boxes[i].x0 || spans[i].x1 != boxes[i].x1) return false;
  return true;
}

// The boxes of one picture, sorted by y0: their union as bands of rows that have the same spans.
void add_bands(std::vector<Box>& out, const Box* boxes, size_t count) {
  std::vector<int64_t> edges;
  edges.reserve(2 * count);
  for (size_t i = 0; i < count; ++i) edges.insert(edges.end(), {boxes[i].y0, boxes[i].y1});
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  Sweep sweep(boxes, boxes + count);
  size_t last = out.size();  // where the band above begins
  for (size_t e = 0; e + 1 < edges.size(); ++e) {
    const std::vector<Span>& spans = sweep.spans_at(edges[e]);
    const bool goes_on = out.size() > last && out.back().y1 == edges[e];
    if (goes_on && equal(spans, out.data() + last, out.size() - last)) {
      for (size_t i = last; i < out.size(); ++i) out[i].y1 = edges[e + 1];
      continue;
    }
    if (!spans.empty()) last = out.size();
    for (const Span& s : spans) out.push_back({boxes->b, edges[e], edges[e + 1], s.x0, s.x1});
  }
}

// Gives the region its boxes: those of any kind as disjoint ones.
void set_boxes(Region& region, std::vector<Box> boxes) {
  const auto first = [](const Box& a, const Box& b) { return a.b != b.b ? a.b < b.b : a.y0 < b.y0; };
  if (!std::is_sorted(boxes.begin(), boxes.end(), first)) std::sort(boxes.begin(), boxes.end(), first);
  region.boxes.clear();
  region.boxes.reserve(boxes.size());
  for (size_t i = 0, end = 0; i < boxes.size(); i = end) {
    while (end < boxes.size() && boxes[end].b == boxes[i].b) ++end;
    add_bands(region.boxes, boxes.data() + i, end - i);
  }
  region.starts.assign(1, 0);
  region.starts.reserve(region.boxes.size() + 1);
  for (const Box& box : region.boxes) region.starts.push_back(region.starts.back() + box.texels());
}

// Runs of tiles that are set, in pixels with their halo.
std::vector<Box> boxes_of(const Tensor& mask, int64_t tile, int64_t height, int64_t width, int64_t halo) {
  const int64_t rows = mask.size(1), columns = mask.size(2);
  std::vector<Box> boxes;
  const bool* set = mask.const_data_ptr<bool>();
  for (int64_t b = 0; b < mask.size(0); ++b)
    for (int64_t row = 0; row < rows; ++row, set += columns)
      for (int64_t x = 0; x < columns; ++x) {
        if (!set[x]) continue;
        const int64_t from = x;
        while (x < columns && set[x]) ++x;
        boxes.push_back({b, std::max<int64_t>(0, row * tile - halo), std::min(height, (row + 1) * tile + halo),
                         std::max<int64_t>(0, from * tile - halo), std::min(width, x * tile + halo)});
      }
  return boxes;
}

// The range of texels of the next level that read [lo, hi) of n: the adjoint of axis_taps (math/pyramid.h).
void parents(int64_t& lo, int64_t& hi, int64_t n) {
  if (n == 1) return;
  lo = n % 2 ? std::max<int64_t>(0, (lo - 1) / 2) : lo / 2;
  hi = std::min<int64_t>(n / 2, (hi + 1) / 2);
}

}  // namespace

bool Region::whole() const { return !on_device && texels() * planes == batch * height * width; }

// Measured: a row of a box takes as long to begin as so many texels of it, and loops over boxes are slower by a half.
bool Region::most() const {
  constexpr int64_t kRowTexels = 24;
  constexpr double kMostShare = 0.55;
  int64_t cost = texels();
  for (const Box& box : boxes) cost += kRowTexels * (box.y1 - box.y0);
  return !on_device && static_cast<double>(cost * planes) > kMostShare * static_cast<double>(batch * height * width);
}

void check_tiles(const char* op, const char* argument, const Tensor& mask, const Tensor& data, int64_t batch, int64_t height,
                 int64_t width, int64_t tile) {
  TEXVLM_CHECK(tile >= 8 && tile <= int64_t{1} << 30, op, "tile", "from 8 to 2^30", tile);
  check_shape(op, argument, mask, "[B, ceil(H / tile), ceil(W / tile)]",
              {batch, (height + tile - 1) / tile, (width + tile - 1) / tile});
  check_dtype(op, argument, mask, at::kBool, "");
  check_same_device(op, argument, mask, data);
  TEXVLM_CHECK(mask.is_contiguous(), op, argument, "contiguous", "strides ", mask.strides());
}

Region region_of(const Tensor& mask, int64_t tile, int64_t height, int64_t width, int64_t halo) {
  Region region;
  region.batch = mask.size(0);
  region.height = height;
  region.width = width;
  region.on_device = on_cuda(mask.device());
  if (region.on_device) {
    const Support support = support_around({0, 0, 0}, halo);
    region.view.mask[0] = {pointer<const bool>(mask), support, support};
    region.view.height = height;
    region.view.width = width;
    region.view.tile = tile;
    region.view.rows = mask.size(1);
    region.view.columns = mask.size(2);
    region.view.planes = 1;
  } else {
    set_boxes(region, boxes_of(mask, tile, height, width, halo));
  }
  return region;
}

Region region_of(const std::vector<Box>& boxes, int64_t batch, int64_t height, int64_t width) {
  Region region;
  region.batch = region.planes = batch;
  region.height = height;
  region.width = width;
  set_boxes(region, boxes);
  return region;
}

Region united(const Region& a, const Region& b) {
  Region out = a;
  if (a.on_device) {
    int at = 0;
    while (at < kMostMasks && out.view.mask[at].tiles) ++at;
    for (const DirtyMask& mask : b.view.mask) {
      if (!mask.tiles) continue;
      TORCH_INTERNAL_ASSERT(at < kMostMasks);
      out.view.mask[at++] = mask;
    }
    return out;
  }
  std::vector<Box> boxes = a.boxes;
  boxes.insert(boxes.end(), b.boxes.begin(), b.boxes.end());
  set_boxes(out, std::move(boxes));
  return out;
}

Region widened(const Region& region, int64_t reach) {
  Region out = region;
  for (DirtyMask& mask : out.view.mask) {
    mask.y = support_around(mask.y, reach);
    mask.x = support_around(mask.x, reach);
  }
  std::vector<Box> boxes = region.boxes;
  for (Box& box : boxes)
    box = {box.b, std::max<int64_t>(0, box.y0 - reach), std::min(region.height, box.y1 + reach),
           std::max<int64_t>(0, box.x0 - reach), std::min(region.width, box.x1 + reach)};
  set_boxes(out, std::move(boxes));
  return out;
}

Region above(const Region& region) {
  Region out = region;
  for (DirtyMask& mask : out.view.mask) {
    mask.y = support_above(mask.y, region.height);
    mask.x = support_above(mask.x, region.width);
  }
  std::vector<Box> boxes = region.boxes;
  for (Box& box : boxes) {
    parents(box.y0, box.y1, region.height);
    parents(box.x0, box.x1, region.width);
  }
  out.height = std::max<int64_t>(1, region.height / 2);
  out.width = std::max<int64_t>(1, region.width / 2);
  set_boxes(out, std::move(boxes));
  return out;
}

Region of_planes(Region region, int64_t planes) {
  region.planes *= planes;
  region.batch *= planes;
  region.view.planes *= planes;
  return region;
}

}  // namespace texvlm
