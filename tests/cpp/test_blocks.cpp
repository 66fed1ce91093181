// The library as a LibTorch program uses it: blocks against the dense formula, the module, packed tensors, errors.
#include <bitsparse/bitsparse.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gpu.h"

namespace {

using torch::Tensor;
using OptionalTensor = std::optional<Tensor>;

::testing::AssertionResult same_bits(const Tensor& got, const Tensor& expected) {
  if (got.defined() != expected.defined()) return ::testing::AssertionFailure() << "one of two is undefined";
  if (!got.defined()) return ::testing::AssertionSuccess();
  if (got.sizes() != expected.sizes() || got.scalar_type() != expected.scalar_type())
    return ::testing::AssertionFailure() << "got " << got.sizes() << ", expected " << expected.sizes();
  const auto bytes = [](const Tensor& t) { return t.detach().cpu().contiguous().flatten().view(torch::kByte); };
  const auto wrong = bytes(got).ne(bytes(expected)).sum().item<std::int64_t>();
  if (wrong == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << wrong << " of " << got.nbytes() << " bytes differ";
}

class Blocks : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (std::string(GetParam()) == "cuda") skip_without_gpu();
    torch::manual_seed(1);
  }
  torch::Device device() const { return torch::Device(GetParam()); }
  Tensor randn(torch::IntArrayRef size, torch::ScalarType type = torch::kFloat, double scale = 1) const {
    return torch::randn(size).mul(scale).to(device(), type);
  }
};

INSTANTIATE_TEST_SUITE_P(Device, Blocks, ::testing::Values("cpu", "cuda"),
                         [](const ::testing::TestParamInfo<const char*>& info) { return std::string(info.param); });

using Function = std::function<Tensor(const std::vector<Tensor>&)>;

OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

// Output, then the gradients of all inputs that are there.
std::vector<Tensor> run(const Function& function, const std::vector<Tensor>& inputs) {
  std::vector<Tensor> leaves, out;
  for (const Tensor& t : inputs) leaves.push_back(t.defined() ? t.detach().clone().requires_grad_() : t);
  const Tensor y = function(leaves);
  y.backward(torch::linspace(-1, 1, y.numel(), y.options().dtype(torch::kFloat)).to(y.scalar_type()).view_as(y));
  out.push_back(y.detach());
  for (const Tensor& leaf : leaves) out.push_back(leaf.defined() ? leaf.grad() : Tensor());
  return out;
}

void expect_same_training(const Function& ours, const Function& dense, const std::vector<Tensor>& inputs) {
  const auto got = run(ours, inputs), expected = run(dense, inputs);
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_TRUE(same_bits(got[i], expected[i])) << (i ? "gradient of argument " + std::to_string(i - 1) : "output");
}

// torch::linear, as F.linear in Python: torch::nn::functional::linear adds the bias in a step of its own, unless x is a
// matrix.
Tensor dense_linear(const std::vector<Tensor>& t, bool squared) {
  Tensor a = torch::relu(t[0]);
  if (squared) a = a.square();
  return torch::linear(a, t[1], optional(t[2]));
}
Tensor dense_ffn(const std::vector<Tensor>& t, bool squared) {
  return dense_linear({torch::linear(t[0], t[1], optional(t[2])), t[3], t[4]}, squared);
}

TEST_P(Blocks, EqualTheDenseFormulas) {
  for (torch::ScalarType type : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    for (const char* codec : {"raw", "signless", "tight"}) {
      for (bool bias : {true, false}) {
        SCOPED_TRACE(::testing::Message() << type << " " << codec << " bias " << bias);
        const Tensor b1 = bias ? randn({356}, type, 0.5) : Tensor(), b2 = bias ? randn({20}, type, 0.5) : Tensor();
        const std::vector<Tensor> ffn = {randn({7, 10, 24}, type), randn({356, 24}, type, 0.2), b1,
                                         randn({20, 356}, type, 0.05), b2};
        const std::vector<Tensor> linear = {randn({70, 356}, type), ffn[3], b2};
        expect_same_training(
            [&](const auto& t) {
              return bitsparse::relu_squared_ffn(t[0], t[1], optional(t[2]), t[3], optional(t[4]), codec);
            },
            [&](const auto& t) { return dense_ffn(t, true); }, ffn);
        expect_same_training(
            [&](const auto& t) { return bitsparse::relu_ffn(t[0], t[1], optional(t[2]), t[3], optional(t[4]), codec); },
            [&](const auto& t) { return dense_ffn(t, false); }, ffn);
        expect_same_training(
            [&](const auto& t) { return bitsparse::relu_squared_linear(t[0], t[1], optional(t[2]), codec); },
            [&](const auto& t) { return dense_linear(t, true); }, linear);
        expect_same_training([&](const auto& t) { return bitsparse::relu_linear(t[0], t[1], optional(t[2]), codec); },
                             [&](const auto& t) { return dense_linear(t, false); }, linear);
      }
    }
  }
}

TEST_P(Blocks, TokensFromNoneToMany) {
  for (std::int64_t tokens : {0, 1, 3, 1000}) {
    SCOPED_TRACE(tokens);
    expect_same_training(
        [](const auto& t) { return bitsparse::relu_squared_ffn(t[0], t[1], t[2], t[3], t[4]); },
        [](const auto& t) { return dense_ffn(t, true); },
        {randn({tokens, 16}), randn({64, 16}, torch::kFloat, 0.25), randn({64}), randn({16, 64}), randn({16})});
  }
}

TEST_P(Blocks, KeepOneLeaseUntilBackward) {
  const auto arena = bitsparse::Arena::create(device());
  const Tensor h = randn({64, 512}).requires_grad_(), w2 = randn({8, 512}).requires_grad_();
  const bitsparse::ArenaGuard guard(arena);
  {
    const torch::NoGradGuard no_grad;
    bitsparse::relu_squared_linear(h, w2);
  }
  EXPECT_EQ(arena->memory_stats(true).leases_total, 0);
  Tensor y = bitsparse::relu_squared_linear(h, w2);
  bitsparse::MemoryStats stats = arena->memory_stats(true);
  EXPECT_EQ(stats.live_leases, 1);
  EXPECT_EQ(stats.dense_bytes, 64 * 512 * 4);
  EXPECT_GT(stats.in_use, 0);

  const auto grads = [&](bool keep) {
    return torch::autograd::grad({y.sum()}, {h, w2}, /*grad_outputs=*/{}, /*retain_graph=*/keep);
  };
  const auto first = grads(true), second = grads(false);
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(same_bits(second[i], first[i]));
  y.reset();
  stats = arena->memory_stats(true);
  EXPECT_EQ(stats.live_leases, 0);
  EXPECT_EQ(stats.in_use, 0);
}

TEST_P(Blocks, DoubleBackwardSaysNo) {
  const Tensor h = randn({8, 64}).requires_grad_(), w2 = randn({4, 64}).requires_grad_();
  const Tensor y = bitsparse::relu_squared_linear(h, w2);
  const Tensor grad = torch::autograd::grad({y.sum()}, {h}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
  try {
    grad.sum().backward();
    ADD_FAILURE() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("double backward is not supported"), std::string::npos) << error.what();
  }
}

template <class Error>
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return std::string("another type of error: ") + error.what();
  }
  return "no error";
}

TEST_P(Blocks, ErrorsNameTheArgument) {
  const Tensor x = randn({5, 16}), w1 = randn({64, 16}), b1 = randn({64}), w2 = randn({16, 64}), b2 = randn({16});
  const auto type_error = [](const std::function<void()>& call) { return message_of<c10::TypeError>(call); };
  const auto value_error = [](const std::function<void()>& call) { return message_of<c10::ValueError>(call); };
  using bitsparse::relu_squared_ffn;
  EXPECT_EQ(type_error([&] { relu_squared_ffn(x.to(torch::kDouble), w1, b1, w2, b2); }),
            "bitsparse::relu_squared_ffn: expected x to have dtype bfloat16, float16 or float32, got Double");
  EXPECT_EQ(type_error([&] { relu_squared_ffn(x, w1.to(torch::kHalf), b1, w2, b2); }),
            "bitsparse::relu_squared_ffn: expected w1 to have the dtype of x (Float), got Half");
  EXPECT_EQ(value_error([&] { relu_squared_ffn(x, w2, b1, w2, b2); }),
            "bitsparse::relu_squared_ffn: expected w1 to have shape (*, 16), got [16, 64]");
  EXPECT_EQ(value_error([&] { relu_squared_ffn(x, w1, b2, w2, b2); }),
            "bitsparse::relu_squared_ffn: expected b1 to have shape (64), got [16]");
  EXPECT_EQ(value_error([&] { bitsparse::relu_linear(x[0][0], w2); }),
            "bitsparse::relu_linear: expected h to have at least 1 dimension, got a scalar");
  EXPECT_EQ(value_error([&] { relu_squared_ffn(x, w1, b1, w2, b2, "zip"); }),
            "bitsparse: expected codec to be 'raw', 'signless' or 'tight', got 'zip'");
  EXPECT_EQ(value_error([] { bitsparse::nn::ReLUSquaredFFN(0); }),
            "bitsparse: ReLUSquaredFFN: expected d_model > 0, got 0");
  EXPECT_EQ(value_error([] { bitsparse::nn::ReLUSquaredFFN(bitsparse::nn::ReLUSquaredFFNOptions(8).codec("zip")); }),
            "bitsparse: expected codec to be 'raw', 'signless' or 'tight', got 'zip'");
}

TEST_P(Blocks, FullArenaIsAnErrorOfItsOwn) {
  bitsparse::ArenaOptions options;
  options.capacity = 0;
  options.spill_bytes = 0;
  const auto arena = bitsparse::Arena::create(device(), options);
  const Tensor h = randn({64, 512}).requires_grad_(), w2 = randn({8, 512});
  const bitsparse::ArenaGuard guard(arena);
  const std::string message = message_of<bitsparse::OutOfArenaMemory>([&] {
    bitsparse::relu_squared_linear(h, w2);
    arena->memory_stats(/*synchronize=*/true);  // on CUDA the host learns it now
  });
  EXPECT_EQ(message.find("bitsparse.OutOfArenaMemory: the arena of "), 0u) << message;
  EXPECT_NE(message.find("Raise Arena(capacity=...)"), std::string::npos) << message;
  EXPECT_EQ(arena->memory_stats().live_leases, 0);
}

TEST_P(Blocks, ModuleIsTwoLinears) {
  torch::manual_seed(3);
  bitsparse::nn::ReLUSquaredFFN ffn(16);
  torch::manual_seed(3);
  const torch::nn::Linear fc(16, 64), proj(64, 16);
  const std::vector<std::pair<std::string, Tensor>> expected = {
      {"fc.weight", fc->weight}, {"fc.bias", fc->bias}, {"proj.weight", proj->weight}, {"proj.bias", proj->bias}};
  const auto parameters = ffn->named_parameters();
  ASSERT_EQ(parameters.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(parameters[i].key(), expected[i].first);
    EXPECT_TRUE(same_bits(parameters[i].value(), expected[i].second)) << expected[i].first;
  }

  ffn->to(device());
  std::vector<Tensor> leaves = {randn({2, 9, 16})};
  for (const auto& item : expected) leaves.push_back(item.second.detach().to(device()).clone().requires_grad_());
  const Tensor x = leaves[0].clone().requires_grad_(), grad = randn({2, 9, 16});
  leaves[0].requires_grad_();
  const Tensor y = ffn(x), dense = dense_ffn(leaves, true);
  EXPECT_TRUE(same_bits(y, dense));
  y.backward(grad);
  dense.backward(grad);
  EXPECT_TRUE(same_bits(x.grad(), leaves[0].grad()));
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(same_bits(ffn->named_parameters()[i].value().grad(), leaves[i + 1].grad())) << expected[i].first;
}

TEST_P(Blocks, ModuleOptions) {
  const auto options = bitsparse::nn::ReLUSquaredFFNOptions(8).d_ff(24).bias(false).codec("raw").fused(true);
  bitsparse::nn::ReLUSquaredFFN ffn(options);
  ffn->to(device(), torch::kBFloat16);
  ASSERT_EQ(ffn->named_parameters().size(), 2u);
  EXPECT_EQ(ffn->fc->weight.sizes(), torch::IntArrayRef({24, 8}));
  EXPECT_EQ(ffn->proj->weight.sizes(), torch::IntArrayRef({8, 24}));
  std::ostringstream text;
  text << ffn;
  EXPECT_NE(text.str().find("bitsparse::nn::ReLUSquaredFFN(d_model=8, d_ff=24, bias=false, codec=raw, fused=true)"),
            std::string::npos)
      << text.str();
  const Tensor x = randn({3, 8}, torch::kBFloat16);
  EXPECT_TRUE(same_bits(ffn(x), dense_ffn({x, ffn->fc->weight, {}, ffn->proj->weight, {}}, true)));
}

TEST_P(Blocks, ModuleClonesAndLoads) {
  bitsparse::nn::ReLUSquaredFFN ffn(bitsparse::nn::ReLUSquaredFFNOptions(8).codec("signless"));
  ffn->to(device());
  const Tensor x = randn({5, 8});
  const Tensor y = ffn(x).detach();
  const auto copy = std::dynamic_pointer_cast<bitsparse::nn::ReLUSquaredFFNImpl>(ffn->clone());
  ASSERT_NE(copy, nullptr);
  EXPECT_EQ(copy->options.codec(), "signless");
  EXPECT_TRUE(same_bits(copy->forward(x), y));

  std::stringstream file;
  torch::save(ffn, file);
  bitsparse::nn::ReLUSquaredFFN loaded(8);
  loaded->to(device());
  torch::load(loaded, file, device());
  EXPECT_TRUE(same_bits(loaded(x), y));

  {
    const torch::NoGradGuard no_grad;
    ffn->fc->weight.zero_();
  }
  EXPECT_TRUE(same_bits(copy->forward(x), y)) << "a clone has parameters of its own";
  EXPECT_FALSE(same_bits(ffn(x), y));
}

constexpr torch::ScalarType kStored[] = {torch::kFloat, torch::kBFloat16, torch::kHalf, torch::kFloat8_e4m3fn,
                                         torch::kFloat8_e5m2};

TEST_P(Blocks, PackedTensorsAreExact) {
  for (torch::ScalarType type : kStored) {
    for (std::int64_t n : {0, 1, 1023, 20001}) {
      Tensor dense = torch::randn({n});
      dense.masked_fill_(torch::rand({n}).gt(0.3), 0);
      if (n > 100) {
        dense[3] = -0.0;
        dense[50] = std::numeric_limits<float>::quiet_NaN();
      }
      const Tensor host = dense.to(type), t = host.to(device());
      for (const char* codec : {"raw", "signless", "tight"}) {
        SCOPED_TRACE(::testing::Message() << type << " " << n << " " << codec);
        const Tensor packed = bitsparse::pack(t, codec);
        EXPECT_EQ(packed.device().type(), t.device().type());
        EXPECT_EQ(packed.scalar_type(), torch::kByte);
        EXPECT_TRUE(same_bits(packed, bitsparse::pack(host, codec))) << "the same bytes on every device";
        for (bool validated : {false, true}) EXPECT_TRUE(same_bits(bitsparse::unpack(packed, {n}, type, validated), t));
        EXPECT_TRUE(same_bits(bitsparse::unpack(packed.cpu(), {n}, type), host));
      }
      const Tensor positive =
          bitsparse::unpack(bitsparse::pack(t, "tight", "positive"), {n}, type).cpu().to(torch::kFloat);
      const Tensor values = host.to(torch::kFloat);
      EXPECT_TRUE(same_bits(positive, values.masked_fill(values.le(0), 0.0)));
    }
  }
}

TEST_P(Blocks, PackedTensorsAreChecked) {
  const Tensor t = randn({50, 40}).t(), packed = bitsparse::pack(t);
  EXPECT_TRUE(same_bits(bitsparse::unpack(packed, {40, 50}, torch::kFloat), t)) << "strides are honoured";
  EXPECT_EQ(message_of<c10::TypeError>([&] { bitsparse::unpack(packed, {2000}, torch::kHalf); }),
            "bitsparse::unpack: expected dtype to be Float as packed, got Half");
  EXPECT_EQ(message_of<c10::ValueError>([&] { bitsparse::unpack(packed, {2001}, torch::kFloat); }),
            "bitsparse::unpack: expected size to have 2000 elements as packed, got [2001]");
  EXPECT_EQ(message_of<c10::TypeError>([&] { bitsparse::pack(randn({3}, torch::kDouble)); }),
            "bitsparse: expected t to have dtype bfloat16, float16, float32, float8_e4m3fn or float8_e5m2, got Double");
  EXPECT_EQ(message_of<c10::ValueError>([&] { bitsparse::pack(t, "tight", "some"); }),
            "bitsparse: expected keep to be 'positive' or 'nonzero', got 'some'");
  for (std::int64_t byte : {0, 4, 16}) {  // mark, version, number of elements
    const Tensor damaged = packed.clone();
    damaged[byte] = damaged[byte].bitwise_xor(0x55);
    EXPECT_THROW(bitsparse::unpack(damaged, {40, 50}, torch::kFloat), c10::Error) << "byte " << byte;
  }
  EXPECT_THROW(bitsparse::unpack(packed.narrow(0, 0, packed.numel() - 16), {2000}, torch::kFloat), c10::Error);
}

TEST(BuildInfo, IsOfThisBuild) {
  const bitsparse::BuildInfo& info = bitsparse::build_info();
  EXPECT_EQ(info.version, BITSPARSE_VERSION);
  EXPECT_EQ(info.torch, TORCH_VERSION);
  EXPECT_FALSE(info.compiler.empty());
#ifdef BITSPARSE_WITH_CUDA
  EXPECT_FALSE(info.cuda.empty());
  EXPECT_FALSE(info.architectures.empty());
#else
  EXPECT_TRUE(info.cuda.empty());
  EXPECT_TRUE(info.architectures.empty());
#endif
}

}  // namespace
