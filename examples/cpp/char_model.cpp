// Trains a character model twice, its ReLU² blocks dense and then compressed, on the same batches from the same
// weights. Every loss and, at the end, every weight must agree to the last bit; the program fails if one does not.
#include <bitsparse/bitsparse.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr std::int64_t kContext = 16;  // bytes that the next one is predicted from
constexpr std::int64_t kBytes = 256;

constexpr char kUsage[] =
    "char_model [--data FILE] [--steps N] [--batch N] [--width N] [--blocks N]\n"
    "           [--codec raw|signless|tight] [--device cpu|cuda] [--seed N]\n";

struct Settings {
  std::string data = DEFAULT_TEXT;
  std::string codec = "tight";
  std::string device = "cpu";
  std::int64_t steps = 200;
  std::int64_t batch = 256;
  std::int64_t width = 128;
  std::int64_t blocks = 4;
  std::int64_t seed = 0;
};

// The block as it is usually written: autograd keeps relu(h) and its square, both four times as wide as x.
struct DenseFFNImpl : torch::nn::Module {
  DenseFFNImpl(const Settings& s)
      : fc(register_module("fc", torch::nn::Linear(s.width, 4 * s.width))),
        proj(register_module("proj", torch::nn::Linear(4 * s.width, s.width))) {}

  torch::Tensor forward(const torch::Tensor& x) { return proj(torch::relu(fc(x)).square()); }

  torch::nn::Linear fc, proj;
};
TORCH_MODULE(DenseFFN);

DenseFFN make_block(const Settings& s, const DenseFFN*) { return DenseFFN(s); }

bitsparse::nn::ReLUSquaredFFN make_block(const Settings& s, const bitsparse::nn::ReLUSquaredFFN*) {
  auto options = bitsparse::nn::ReLUSquaredFFNOptions(s.width).d_ff(4 * s.width).bias(true).codec(s.codec);
  return bitsparse::nn::ReLUSquaredFFN(options);
}

template <class Block>
struct CharModel : torch::nn::Module {
  explicit CharModel(const Settings& s)
      : embedding(register_module("embedding", torch::nn::Embedding(kBytes, s.width / 4))),
        mix(register_module("mix", torch::nn::Linear(kContext * (s.width / 4), s.width))),
        head(register_module("head", torch::nn::Linear(s.width, kBytes))) {
    for (std::int64_t i = 0; i < s.blocks; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), make_block(s, static_cast<Block*>(nullptr))));
    }
  }

  torch::Tensor forward(const torch::Tensor& context) {
    torch::Tensor x = mix(embedding(context).flatten(1));
    for (Block& block : blocks) x = x + block->forward(torch::layer_norm(x, {x.size(-1)}));
    return head(torch::layer_norm(x, {x.size(-1)}));
  }

  torch::nn::Embedding embedding;
  torch::nn::Linear mix, head;
  std::vector<Block> blocks;
};

// Both kinds of block name their parameters alike, so that weights move from one model to the other by name.
template <class From, class To>
void copy_weights(const From& from, To& to) {
  torch::NoGradGuard no_grad;
  auto values = from.named_parameters();
  for (auto& parameter : to.named_parameters()) parameter.value().copy_(values[parameter.key()]);
}

template <class A, class B>
bool equal_weights(const A& a, const B& b) {
  auto values = b.named_parameters();
  for (const auto& parameter : a.named_parameters()) {
    const auto bits = [](const torch::Tensor& t) { return t.detach().view(torch::kInt); };
    if (!torch::equal(bits(parameter.value()), bits(values[parameter.key()]))) return false;
  }
  return true;
}

struct Run {
  std::vector<float> losses;
  std::int64_t saved_bytes = 0;  // the most that the arena held between forward and backward
};

template <class Model>
Run train(Model& model, const torch::Tensor& text, const Settings& s) {
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(2e-3));
  torch::manual_seed(s.seed);  // the batches
  const torch::Tensor offsets = torch::arange(kContext);
  Run run;
  for (std::int64_t step = 0; step < s.steps; ++step) {
    const torch::Tensor start = torch::randint(text.numel() - kContext, {s.batch}, torch::kLong);
    const torch::Tensor context = text.index({start.unsqueeze(1) + offsets}).to(s.device);
    const torch::Tensor next = text.index({start + kContext}).to(s.device);
    optimizer.zero_grad();
    const torch::Tensor loss = torch::cross_entropy_loss(model.forward(context), next);
    const auto stats = bitsparse::memory_stats(torch::Device(s.device), /*synchronize=*/true);
    run.saved_bytes = std::max(run.saved_bytes, stats.in_use);
    loss.backward();
    optimizer.step();
    run.losses.push_back(loss.item<float>());
  }
  return run;
}

torch::Tensor read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (bytes.size() <= kContext) {
    throw std::runtime_error("--data " + path + ": expected a file of more than " + std::to_string(kContext) +
                             " bytes");
  }
  const auto size = static_cast<std::int64_t>(bytes.size());
  return torch::from_blob(const_cast<char*>(bytes.data()), {size}, torch::kUInt8).to(torch::kLong);
}

Settings parse(int argc, char** argv) {
  Settings s;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (i + 1 == argc) throw std::runtime_error(name + ": expected a value after it");
    const std::string value = argv[i + 1];
    const auto number = [&] {
      std::size_t used = 0;
      std::int64_t n = -1;
      try {
        n = std::stoll(value, &used);
      } catch (const std::exception&) {
      }
      if (used != value.size() || n < 0) throw std::runtime_error(name + ": expected a number, got " + value);
      return n;
    };
    if (name == "--data") {
      s.data = value;
    } else if (name == "--codec") {
      s.codec = value;
    } else if (name == "--device") {
      s.device = value;
    } else if (name == "--steps") {
      s.steps = number();
    } else if (name == "--batch") {
      s.batch = number();
    } else if (name == "--width") {
      s.width = number();
    } else if (name == "--blocks") {
      s.blocks = number();
    } else if (name == "--seed") {
      s.seed = number();
    } else {
      throw std::runtime_error("unknown option " + name + "; usage:\n" + kUsage);
    }
  }
  return s;
}

int run(const Settings& s) {
  const torch::Tensor text = read_text(s.data);
  std::printf("%lld bytes of %s, %lld blocks of width %lld, codec %s, on %s\n", static_cast<long long>(text.numel()),
              s.data.c_str(), static_cast<long long>(s.blocks), static_cast<long long>(s.width), s.codec.c_str(),
              s.device.c_str());

  torch::manual_seed(s.seed);  // the weights
  CharModel<DenseFFN> dense(s);
  CharModel<bitsparse::nn::ReLUSquaredFFN> compressed(s);
  copy_weights(dense, compressed);
  dense.to(torch::Device(s.device));
  compressed.to(torch::Device(s.device));

  const Run a = train(dense, text, s);
  const Run b = train(compressed, text, s);

  std::size_t equal = 0;
  std::printf("%6s  %10s  %10s\n", "step", "dense", "bitsparse");
  for (std::size_t i = 0; i < a.losses.size(); ++i) {
    const bool same = std::memcmp(&a.losses[i], &b.losses[i], sizeof(float)) == 0;
    equal += same;
    if (!same || i + 1 == a.losses.size() || i % std::max<std::size_t>(1, a.losses.size() / 10) == 0) {
      std::printf("%6zu  %10.6f  %10.6f%s\n", i, a.losses[i], b.losses[i], same ? "" : "  differs");
    }
  }
  const bool weights = equal_weights(dense, compressed);
  const std::int64_t wide = s.blocks * s.batch * 4 * s.width * static_cast<std::int64_t>(sizeof(float));
  std::printf("losses equal to the last bit: %zu of %zu\n", equal, a.losses.size());
  std::printf("weights equal to the last bit: %s\n", weights ? "yes" : "no");
  std::printf("wide activations kept for backward: dense %lld bytes, bitsparse %lld bytes\n",
              static_cast<long long>(2 * wide), static_cast<long long>(b.saved_bytes));
  return weights && equal == a.losses.size() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--help") == 0) return std::fputs(kUsage, stdout) < 0;
  try {
    return run(parse(argc, argv));
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "char_model: %s\n", error.what_without_backtrace());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "char_model: %s\n", error.what());
    return 2;
  }
}
