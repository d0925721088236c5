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
  expect(std::abs(slope - image.grad()[0][1][4][3].item<double>()) < 1e-7, "gradient through pyramid and samples equals the slope");
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
  expect(indices.size(1) == 273 && values[0][0].item<float>() == saliency.max().item<float>(), "the best of 273 places is the maximum");
  bool clear = false;
  try {
    texvlm::generate_mipmaps(torch::rand({3, 8, 8}));
  } catch (const std::exception& error) {
    clear = std::string(error.what()).find("image must be [B, C, H, W]") != std::string::npos;
  }
  expect(clear, "a picture without a batch is refused in one clear line");
}

}  // namespace

int main() {
  torch::manual_seed(0);
  check_gradient();
  train_texture();
  select_places();
  return failures == 0 ? 0 : 1;
}
