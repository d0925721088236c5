// All schemas of texvlm in the order of the pipeline: the map of the project. Implementations are in the .cpp of each stem.
//
// An op that reads or writes a texture takes it as (data, height, width, reducer, levels), where there is but one reducer without
// it: data [B, T, C] packed, height and width of level 0 in texels, reducer one name or one per channel, levels >= 1. uv in [0,
// 1], texel centres at (i + 0.5) / n; lod in levels, 0 is full size. A *_backward op takes the gradients of the results, then
// what it needs of the op's arguments and results, called as there, then `mask`: which of its own results are wanted. The others
// come back undefined. (autograd.h)
#include <torch/library.h>

TORCH_LIBRARY(texvlm, m) {
  const std::vector<at::Tag> compliant = {at::Tag::pt2_compliant_tag};
#define TEXVLM_TEXTURE "SymInt height, SymInt width, str[] reducer, int levels"

  // tiles: frame and reference [B, C, H, W] (any strides; uint8 or floating point) -> dirty bool [B, ceil(H / tile), ceil(W /
  // tile)]: tiles in which a value, or for measure "mean" the mean of a block of 8 x 8, differs by more than the threshold (of
  // uint8, times 255); tiles int64 [B, rows * columns]: these, row-major, then -1; count int64 [B]. reference gets the frame's
  // values there
  m.def(
      "dirty_tiles(Tensor frame, Tensor(a!) reference, int tile, float threshold=0., str measure=\"largest\") "
      "-> (Tensor dirty, Tensor tiles, Tensor count)",
      compliant);

  // pyramid: image [B, C, H, W] (any strides; uint8 is divided by 255) -> data [B, T, C]
  m.def("generate_mipmaps(Tensor image, str[] reducer, int levels, ScalarType? dtype=None) -> Tensor", compliant);
  m.def("generate_mipmaps_backward(Tensor grad, " TEXVLM_TEXTURE ", Tensor? data=None) -> Tensor", compliant);
  // rects int64 [R, 4] on the CPU: (y0, x0, y1, x1), half-open, in level-0 texels; or tiles bool [B, ceil(H / tile),
  // ceil(W / tile)] beside data; without either, everything
  m.def("update_mipmaps(Tensor(a!) data, " TEXVLM_TEXTURE ", Tensor? rects=None, Tensor? tiles=None, int tile=0) -> ()",
        compliant);

  // gl: the levels above 0 by the graphics driver, reducer mean; float32 and float16 texels (uint8 is divided by 255)
  m.def("generate_mipmaps_gl(Tensor image, int levels, ScalarType? dtype=None) -> Tensor", compliant);

  // laplacian: band l is level l minus the bilinearly enlarged level l + 1; the last band is the last level
  m.def("laplacian_decompose(Tensor data, SymInt height, SymInt width, int levels) -> Tensor", compliant);
  m.def("laplacian_decompose_backward(Tensor grad, SymInt height, SymInt width, int levels) -> Tensor", compliant);
  m.def("laplacian_reconstruct(Tensor bands, SymInt height, SymInt width, int levels) -> Tensor", compliant);
  m.def("laplacian_reconstruct_backward(Tensor grad, SymInt height, SymInt width, int levels) -> Tensor", compliant);

  // sample: uv [B, N, 2], lod [B, N] -> [B, N, C]; filter nearest, bilinear, trilinear; address clamp, wrap, mirror, border
  m.def("sample_lod(Tensor data, Tensor uv, Tensor lod, " TEXVLM_TEXTURE
        ", str filter=\"trilinear\", str address=\"clamp\") -> Tensor",
        compliant);
  m.def("sample_lod_backward(Tensor grad, Tensor data, Tensor uv, Tensor lod, " TEXVLM_TEXTURE
        ", str filter, str address, *, bool[3] mask) -> (Tensor grad_data, Tensor grad_uv, Tensor grad_lod)",
        compliant);

  // footprint: ddx, ddy [B, N, 2] in uv units per pixel -> [B, N, C]
  m.def("sample_grad(Tensor data, Tensor uv, Tensor ddx, Tensor ddy, " TEXVLM_TEXTURE
        ", int max_anisotropy=16, str address=\"clamp\") -> Tensor",
        compliant);
  m.def("sample_grad_backward(Tensor grad, Tensor data, Tensor uv, Tensor ddx, Tensor ddy, " TEXVLM_TEXTURE
        ", int max_anisotropy, str address, *, bool[4] mask) "
        "-> (Tensor grad_data, Tensor grad_uv, Tensor grad_ddx, Tensor grad_ddy)",
        compliant);

  // hardware: the same through texture units (on the CPU: their emulation), filtered with 8-bit weights; gradients are those of
  // sample_lod and sample_grad. torch.classes.texvlm.HardwareTexture, a handle, is registered in hardware.cpp.
  m.def("sample_lod_hardware(Tensor data, Tensor uv, Tensor lod, " TEXVLM_TEXTURE
        ", str filter=\"trilinear\", str address=\"clamp\") -> Tensor",
        compliant);
  m.def("sample_grad_hardware(Tensor data, Tensor uv, Tensor ddx, Tensor ddy, " TEXVLM_TEXTURE
        ", int max_anisotropy=16, str address=\"clamp\") -> Tensor",
        compliant);

  // patches: center [B, N, 2] uv, lod [B, N], axes [B, N, 2, 2] -> [B, N, C, size, size], samples 2^lod level-0 texels apart
  m.def("extract_patches(Tensor data, Tensor center, Tensor lod, " TEXVLM_TEXTURE
        ", int size=16, str address=\"clamp\", Tensor? axes=None) -> Tensor",
        compliant);
  m.def("extract_patches_backward(Tensor grad, Tensor data, Tensor center, Tensor lod, " TEXVLM_TEXTURE
        ", int size, str address, Tensor? axes, *, bool[4] mask) "
        "-> (Tensor grad_data, Tensor grad_center, Tensor grad_lod, Tensor grad_axes)",
        compliant);

  // fovea: fixation [B, F, 2] uv, offsets [N, 2] level-0 pixels, m0 and e0 pixels -> uv [B, F, N, 2], lod [B, F, N]
  m.def(
      "fovea_tokens(Tensor fixation, Tensor offsets, Tensor m0, Tensor e0, SymInt height, SymInt width, int levels) -> (Tensor, Tensor)",
      compliant);
  m.def(
      "fovea_tokens_backward(Tensor grad_uv, Tensor grad_lod, Tensor fixation, Tensor offsets, Tensor m0, Tensor e0, "
      "SymInt height, SymInt width, int levels, *, bool[4] mask) "
      "-> (Tensor grad_fixation, Tensor grad_offsets, Tensor grad_m0, Tensor grad_e0)",
      compliant);

  // distance: mask bool [B, H, W] -> squared distance to the nearest True, int64, and its row-major index (empty: H^2 + W^2, -1);
  // method exact, or jfa (jump flooding, approximate)
  m.def("distance_transform(Tensor mask, str method=\"exact\") -> (Tensor, Tensor)", compliant);

  // salience: image [B, 3, H, W] in [0, 1], previous alike -> [B, H, W] in [0, 1]
  m.def("saliency(Tensor image, Tensor? previous=None) -> Tensor", compliant);
  m.def(
      "saliency_backward(Tensor grad, Tensor image, Tensor? previous, *, bool[2] mask) -> (Tensor grad_image, Tensor grad_previous)",
      compliant);
  // In place: colours [3 B, T, 1] and features [7 B, T', 1] of the picture before, brought up to image where dirty, bool
  // [B, ceil(H / tile), ceil(W / tile)], says that it changed, and before that the picture before had; first: from nothing
  // -> the map of saliency at its own level [B, h, w], with the picture before as `previous`
  m.def(
      "update_saliency(Tensor image, Tensor(a!) colours, Tensor(b!) features, Tensor dirty, Tensor before, int tile, "
      "bool first=False) -> Tensor",
      compliant);

  // flow: previous, current [B, 3, H, W] -> flow from current to previous, float32 [B, 2, H, W] in pixels (x, y), and where the
  // current picture shows what the previous one does not, bool [B, H, W]; searched down to level `finest`, beginning at the flow
  // `initial` [B, 2, h, w], in pixels of its own grid
  m.def("optical_flow(Tensor previous, Tensor current, int? finest=None, Tensor? initial=None) -> (Tensor, Tensor)", compliant);

  // warping: planes [B, C, H, W], flow [B, 2, h, w] in pixels of its own grid, occlusion bool [B, h, w] -> [B, C, H, W];
  // what is occluded is filled, or with fill = None stays where it is
  m.def("warp(Tensor planes, Tensor flow, float? fill=0., Tensor? occlusion=None) -> Tensor", compliant);
  m.def(
      "warp_backward(Tensor grad, Tensor planes, Tensor flow, float? fill, Tensor? occlusion, *, bool[2] mask) "
      "-> (Tensor grad_planes, Tensor grad_flow)",
      compliant);
  // image, previous [B, 3, H, W] -> |luma - luma of previous, moved by flow| [B, H, W]; not moved where occluded
  m.def("motion(Tensor image, Tensor previous, Tensor? flow=None, Tensor? occlusion=None) -> Tensor", compliant);
  m.def(
      "motion_backward(Tensor grad, Tensor image, Tensor previous, Tensor? flow, Tensor? occlusion, *, bool[3] mask) "
      "-> (Tensor grad_image, Tensor grad_previous, Tensor grad_flow)",
      compliant);

  // carrying: appearance of cells now, before, and of the values held [B, A, rows, columns]; offset [B, 2, rows, columns] (y, x)
  // of the values in cells; still bool [B, rows, columns]; flow [B, 2, h, w] in pixels of its own grid, occlusion bool [B, h, w]
  //   -> source int64 [B, rows, columns], offset and held after the move, residual [2, B, rows, columns]
  m.def(
      "carry(Tensor now, Tensor before, Tensor held, Tensor offset, Tensor still, Tensor? flow=None, Tensor? occlusion=None, "
      "float floor=0.01568627450980392, float quiet=0.015625, float occluded=0.5) "
      "-> (Tensor source, Tensor offset_after, Tensor held_after, Tensor residual)",
      compliant);

  // history: points [B, P, 2] uv, weights [B, P], sigma of the longer side, base [B, H, W]
  //   -> min(1, keep base + sum of weighted Gaussians) [B, H, W]
  m.def(
      "gaussian_splat(Tensor points, Tensor weights, float sigma, SymInt height, SymInt width, float keep=1., "
      "Tensor? base=None) -> Tensor",
      compliant);
  m.def(
      "gaussian_splat_backward(Tensor grad, Tensor out, Tensor points, Tensor weights, float sigma, float keep, *, bool[3] mask) "
      "-> (Tensor grad_points, Tensor grad_weights, Tensor grad_base)",
      compliant);
  // planes [B, h, w], read bilinearly at the pixels of height x width -> [B, H, W]
  m.def("enlarge(Tensor planes, SymInt height, SymInt width) -> Tensor", compliant);
  m.def("enlarge_backward(Tensor grad, SymInt height, SymInt width) -> Tensor", compliant);

  // text: image [B, 3, H, W] in [0, 1], weights float32 [5409] of the network -> [B, H, W] in [0, 1]; no gradient
  m.def("text_regions(Tensor image, Tensor weights) -> Tensor", compliant);

  // superpixel: image [B, 3, H, W] -> labels int64 [B, H, W] in 0 .. count - 1, count int64 [B] = min(n, H W); each one piece
  m.def("superpixels(Tensor image, int n) -> (Tensor, Tensor)", compliant);
  // labels int64 [B, H, W] below n -> float32 [B, 3, H, W]: label, distance from its centre over its radius, share of the picture
  m.def("superpixel_channels(Tensor labels, SymInt n) -> Tensor", compliant);
  // image [B, 3, H, W], labels int64 [B, H, W] -> float32 [B, H, W]: 1 where labels change and there is an edge
  m.def("boundaries(Tensor image, Tensor labels) -> Tensor", compliant);

  // channels: image [B, 3, H, W], channels = indices into CHANNELS, fixation [B, 2] uv -> data [B, T, len(channels)]; given:
  // planes [B, n, h, w] of the channels given_channels (n of them in turn), h <= H, w <= W, enlarged bilinearly, which replace
  // the formula
  m.def(
      "build_channels(Tensor image, int[] channels, int levels, Tensor[] given, int[] given_channels, ScalarType? dtype=None, "
      "Tensor? previous=None, Tensor? fixation=None) -> Tensor",
      compliant);
  m.def(
      "build_channels_backward(Tensor grad, Tensor data, Tensor image, int[] channels, int levels, Tensor[] given, "
      "int[] given_channels, Tensor? previous, Tensor? fixation, *, bool[] mask) "
      "-> (Tensor grad_image, Tensor grad_previous, Tensor grad_fixation, Tensor[] grad_given)",
      compliant);
  // In place: data [B, T, len(channels)] and planes [4, B, H, W] (luma, edge, contrast-normalised luma, motion) of the picture
  // before, brought up to image where dirty, bool [B, ceil(H / tile), ceil(W / tile)], says that it changed, and before that the
  // picture before had; first: from nothing
  m.def(
      "update_channels(Tensor(a!) data, Tensor(b!) planes, Tensor image, Tensor dirty, Tensor before, int[] channels, int levels, "
      "int tile, Tensor? fixation=None, bool first=False) -> ()",
      compliant);

  // features: cells int64 [B, n], row-major in the grid of ceil(H / cell) x ceil(W / cell); terms mean, max, min, variance, rms,
  // cosine (with query [B or 1, D]), entropy, residual; channels: the first channel of each in data; lights: red, green, blue,
  // for the last two -> [B, n, terms]; weights: of each term, or none -> their weighted sum [B, n]
  m.def("cell_features(Tensor data, Tensor cells, " TEXVLM_TEXTURE
        ", int cell, int samples, str[] terms, int[] channels, Tensor? query=None, int[] lights=[0, 1, 2], float[] weights=[]) "
        "-> Tensor",
        compliant);
  m.def("cell_features_backward(Tensor grad, Tensor data, Tensor cells, " TEXVLM_TEXTURE
        ", int cell, int samples, str[] terms, int[] channels, Tensor? query, int[] lights, float[] weights, *, bool[2] mask) "
        "-> (Tensor grad_data, Tensor grad_query)",
        compliant);

  // quadtree: values [B, nodes] of the nodes over rows x columns cells, the cells first, level by level ceil(rows / 2^l) x
  // ceil(columns / 2^l) -> taken bool [B, nodes]: k disjoint nodes; bound [B] of the value of any k; price [B] of a token
  m.def(
      "quadtree_cut(Tensor values, SymInt rows, SymInt columns, int levels, int k) -> (Tensor taken, Tensor bound, Tensor price)",
      compliant);

  // prediction: image [B, C, H, W] (any strides) -> int64 [B, ceil(H / cell) * ceil(W / cell)]: the cell that each is put back
  // as, its own where it is kept; they differ by at most `bound` in every value (of uint8, divided by 255)
  m.def("predict_cells(Tensor image, int cell, float bound=0.) -> Tensor", compliant);

  // packing: image [B, C, H, W] (any strides), resized to height x width, cells of patch * merge pixels: int64 [B, K], row-major,
  // or [B, K, 3] (level, row, column), negative: none -> rows [B, K merge^2, C temporal patch^2], (x * scale - mean) / std
  m.def(
      "pack_cells(Tensor image, Tensor cells, SymInt height, SymInt width, int patch=16, int merge=2, int temporal=2, "
      "float[] mean=[0.5], float[] std=[0.5], float scale=1.) -> Tensor",
      compliant);
  m.def(
      "pack_cells_backward(Tensor grad, Tensor cells, SymInt image_height, SymInt image_width, SymInt height, SymInt width, "
      "int patch, int merge, int temporal, float[] std, float scale) -> Tensor",
      compliant);

  // soft_selection: scores [B, N] -> weights [B, N] in [0, 1] that sum to k, link((score - threshold) / temperature), and float64
  // threshold [B]; link logistic, or gumbel: 1 - exp(-exp(z)); -inf and NaN have weight 0
  m.def("soft_topk(Tensor scores, SymInt k, float temperature, str link=\"logistic\") -> (Tensor weights, Tensor threshold)",
        compliant);
  m.def(
      "soft_topk_backward(Tensor grad_weights, Tensor grad_threshold, Tensor scores, Tensor threshold, float temperature, str link) "
      "-> Tensor",
      compliant);

  // cascade: scores [B, N] -> the k best, values and int64 indices [B, min(k, N)], best first, ties to the lowest index, NaN last
  m.def("select_topk(Tensor scores, SymInt k) -> (Tensor values, Tensor indices)", compliant);
  m.def("select_topk_backward(Tensor grad, Tensor indices, SymInt count) -> Tensor", compliant);
  // -> what cells int64 [B, N] hold at these places, or the places themselves, in the order of the places: int64 [B, min(k, N)]
  m.def("keep_topk(Tensor scores, SymInt k, Tensor? cells=None) -> Tensor", compliant);
  // mask bool [B, N] -> int64 indices [B, N] of what is set, in order, -1 beyond; int64 counts [B]
  m.def("compact(Tensor mask) -> (Tensor, Tensor)", compliant);

  // perturbation: scores [B, N] + sigma * normal noise, `samples` times -> int64 indices [B, samples, k] of the best k,
  // ascending, and gate [B, samples, k], 1 / samples, whose gradient is that of the mean over the noise; seed tells the noise
  m.def("perturbed_topk(Tensor scores, SymInt k, int samples, float sigma, int seed) -> (Tensor gate, Tensor indices)",
        compliant);
  m.def("perturbed_topk_backward(Tensor grad, Tensor scores, int samples, float sigma, int seed) -> Tensor", compliant);

  // attention: k, v [B, heads, N, D] of the places of a grid, log_weight [B, N] (-inf: not there) -> of the cells of all levels,
  // one level after another, ceil(height / 2^l) x ceil(width / 2^l): keys and values [B, heads, M, D], their means; log_count [B,
  // M], the log of the sum of weights; spread [B, heads, M, 2], the variances of keys and of values; low and high [B, heads, M,
  // D], the least and largest key
  m.def(
      "attention_pack(Tensor k, Tensor v, SymInt height, SymInt width, int[] levels, Tensor? log_weight=None) "
      "-> (Tensor keys, Tensor values, Tensor log_count, Tensor spread, Tensor low, Tensor high)",
      compliant);
  m.def(
      "attention_pack_backward(Tensor grad_keys, Tensor grad_values, Tensor grad_log_count, Tensor k, Tensor v, SymInt height, "
      "SymInt width, int[] levels, Tensor? log_weight, Tensor keys, Tensor values, Tensor log_count, *, bool[3] mask) "
      "-> (Tensor grad_k, Tensor grad_v, Tensor grad_log_weight)",
      compliant);
  // q [B, H, Nq, D], H a multiple of heads; query_tile: rows and columns of queries on the grid that choose together, or [1, 1];
  // counts: how many cells of each level are split; choice int32 [B, H, tiles, sum(counts)]: which; prefix [B, heads, P, D]
  //   -> out [B, H, Nq, D], lse [B, H, Nq], chosen as choice, mass [B, H, N] (or 0 places): the sum over queries
  m.def(
      "hierarchical_attention(Tensor q, Tensor k, Tensor v, Tensor keys, Tensor values, Tensor log_count, Tensor spread, Tensor low, "
      "Tensor high, SymInt height, SymInt width, int[] levels, int[] counts, float scale, int[] query_tile, "
      "str importance=\"spread\", bool with_mass=False, Tensor? log_weight=None, Tensor? prefix_k=None, Tensor? prefix_v=None, "
      "Tensor? choice=None) -> (Tensor out, Tensor lse, Tensor chosen, Tensor mass)",
      compliant);
  m.def(
      "hierarchical_attention_backward(Tensor grad, Tensor grad_lse, Tensor q, Tensor k, Tensor v, Tensor keys, Tensor values, "
      "Tensor log_count, Tensor out, Tensor lse, Tensor chosen, SymInt height, SymInt width, int[] levels, int[] counts, float scale, "
      "int[] query_tile, Tensor? log_weight, Tensor? prefix_k, Tensor? prefix_v, *, bool[9] mask) "
      "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_keys, Tensor grad_values, Tensor grad_log_count, "
      "Tensor grad_log_weight, Tensor grad_prefix_k, Tensor grad_prefix_v)",
      compliant);
}
