// Trains a texture from C++: builds a pyramid, samples it, back-propagates, and fits the texels to what a target shows.
#include <texvlm/ops.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>

namespace {

int failures = 0;

void expect(bool ok, const char* what) {
  std::printf("%s: %s\n", ok ? "ok" : "FAILED", what);
  failures += !ok;
}

// The gradient of a sum of samples to one texel, by the op and by central differences.
void check_gradient() {
  torch::Tensor image = torch::rand({1, 2, 9, 7}, torch::kDouble).requires_grad_();
  const torch::Tensor uv = torch::rand({1, 20, 2}, torch::kDouble), lod = torch::rand({1, 20}, torch::kDouble) * 2;
  const torch::Tensor weight = torch::rand({1, 20, 2}, torch::kDouble);
  const auto loss = [&](const torch::Tensor& picture) {
    return (texvlm::sample_lod(texvlm::generate_mipmaps(picture), uv, lod) * weight).sum();
  };
  loss(image).backward();
  const torch::NoGradGuard no_grad;
  torch::Tensor up = image.clone(), down = image.clone();
  up[0][1][4][3] += 1e-5;
  down[0][1][4][3] -= 1e-5;
  const double slope = (loss(up) - loss(down)).item<double>() / 2e-5;
  expect(std::abs(slope - image.grad()[0][1][4][3].item<double>()) < 1e-7,
         "gradient through pyramid and samples equals the slope");
}

void train_texture() {
  const torch::Tensor target = torch::rand({1, 3, 64, 64});
  torch::Tensor texels = torch::full({1, 3, 64, 64}, 0.5f).requires_grad_();
  torch::optim::Adam optimizer({texels}, torch::optim::AdamOptions(0.05));
  double first = 0, last = 0;
  for (int step = 0; step < 200; ++step) {
    const torch::Tensor uv = torch::rand({1, 2048, 2}), lod = torch::rand({1, 2048});
    const torch::Tensor wanted = texvlm::sample_lod(texvlm::generate_mipmaps(target), uv, lod);
    const torch::Tensor loss = torch::mse_loss(texvlm::sample_lod(texvlm::generate_mipmaps(texels), uv, lod), wanted);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  std::printf("loss %.5f -> %.6f\n", first, last);
  expect(last < 0.02 * first, "200 steps of Adam take the loss below 2 % of what it was");
}

void select_places() {
  const torch::Tensor saliency = texvlm::saliency(torch::rand({1, 3, 64, 64}));
  const auto [values, indices] = texvlm::select_topk(saliency.flatten(1), 273);
  expect(indices.size(1) == 273 && values[0][0].item<float>() == saliency.max().item<float>(),
         "the best of 273 places is the maximum");
  bool clear = false;
  try {
    texvlm::generate_mipmaps(torch::rand({3, 8, 8}));
  } catch (const std::exception& error) {
    clear = std::string(error.what()).find("image must be [B, C, H, W]") != std::string::npos;
  }
  expect(clear, "a picture without a batch is refused in one clear line");
}

// Every other function once: a signature that is not the schema's raises.
void call_the_rest() {
  const torch::Tensor image = torch::rand({1, 3, 40, 48}), plane = torch::rand({1, 40, 48}), uv = torch::rand({1, 5, 2});
  const torch::Tensor lod = torch::rand({1, 5}), small = torch::full({1, 5, 2}, 0.01);
  const texvlm::Texture texture = texvlm::generate_mipmaps(image);
  texvlm::update_mipmaps(texture);
  const torch::Tensor bands = texvlm::laplacian_decompose(texture);
  const torch::Tensor back = texvlm::laplacian_reconstruct(bands, texture.height, texture.width, texture.levels);
  expect(torch::allclose(back, texture.data, 1e-5, 1e-6), "a Laplacian pyramid inverts");
  expect(texvlm::sample_grad(texture, uv, small, small).size(2) == 3, "sample_grad");
  expect(texvlm::sample_lod_hardware(texture, uv, lod).size(1) == 5, "sample_lod_hardware");
  expect(texvlm::sample_grad_hardware(texture, uv, small, small).size(1) == 5, "sample_grad_hardware");
  expect(texvlm::extract_patches(texture, uv, lod, 4).size(4) == 4, "extract_patches");
  const auto [places, lods] =
      texvlm::fovea_tokens(uv, torch::rand({7, 2}) * 20, torch::tensor(8.0f), torch::tensor(8.0f), 40, 48, 6);
  expect(places.size(2) == 7 && lods.size(2) == 7, "fovea_tokens");
  const auto [squared, nearest] = texvlm::distance_transform(plane > 0.9);
  expect(squared.scalar_type() == torch::kLong && nearest.scalar_type() == torch::kLong, "distance_transform");
  const auto [flow, occlusion] = texvlm::optical_flow(image, image);
  expect(flow.abs().max().item<float>() < 0.5f, "optical_flow of a still picture");
  expect(texvlm::warp(image, flow, 0, occlusion).sizes() == image.sizes(), "warp");
  expect(texvlm::motion(image, image).max().item<float>() == 0, "motion of a still picture");
  expect(texvlm::gaussian_splat(uv, lod, 0.1, 40, 48).size(1) == 40, "gaussian_splat");
  expect(texvlm::enlarge(plane, 80, 96).size(2) == 96, "enlarge");
  const auto [labels, count] = texvlm::superpixels(image, 10);
  expect(texvlm::superpixel_channels(labels, 10).size(1) == 3, "superpixel_channels");
  expect(texvlm::boundaries(image, labels).sizes() == plane.sizes(), "boundaries");
  expect(texvlm::build_channels(image, {0, 3, 39}, 0, {plane.unsqueeze(1)}, {39}).size(2) == 3, "build_channels");
  const auto [kept, kept_count] = texvlm::compact(plane.flatten(1) > 0.5);
  expect(kept.size(1) == 40 * 48 && kept_count.size(0) == 1, "compact");
  const texvlm::Texture channels{texvlm::build_channels(image, {0, 1, 2, 3, 8}),
                                 40,
                                 48,
                                 texvlm::level_count(40, 48),
                                 {"mean", "mean", "mean", "max", "mean"}};
  expect(texvlm::cell_features(channels, torch::arange(9).view({1, 9}), 16, 1, {"rms", "entropy"}, {3, 0}).size(2) == 2,
         "cell_features");
  expect(std::get<2>(texvlm::dirty_tiles(image, torch::zeros_like(image))).item<int64_t>() == 2 * 2, "dirty_tiles");
  expect(texvlm::predict_cells(image).size(1) == 3 * 3, "predict_cells");
  expect(texvlm::pack_cells(image, torch::arange(4).view({1, 4}), 64, 64).size(1) == 16, "pack_cells");
  expect(std::get<0>(texvlm::quadtree_cut(torch::rand({1, 21}), 4, 4, 3, 5)).sum().item<int64_t>() == 5, "quadtree_cut");
}

}  // namespace

int main() {
  torch::manual_seed(0);
  check_gradient();
  train_texture();
  select_places();
  call_the_rest();
  return failures == 0 ? 0 : 1;
}
