// Trains a step that gradfuse saved, in plain onnxruntime:
//
//     train FOLDER EPOCHS [LIBRARY]
//
// FOLDER is what export.py has written; the trained values go to FOLDER/trained.safetensors. LIBRARY is gradfuse's,
// with kernels for the fused operators. Without it they run by their function bodies.

#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

constexpr std::string_view kUpdated = ".updated";
constexpr int64_t kBatchSize = 64, kPixels = 64, kClasses = 10;

Ort::MemoryInfo Cpu() { return Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault); }

// A tensor over memory of the caller.
template <typename T>
Ort::Value View(T* data, const std::vector<int64_t>& shape) {
  size_t size = 1;
  for (int64_t length : shape) size *= static_cast<size_t>(length);
  return Ort::Value::CreateTensor<T>(Cpu(), data, size, shape.data(), shape.size());
}

// Runs a saved step again and again. Parameters and state stay in onnxruntime's tensors: each step gives new ones,
// which the next step takes.
class Trainer {
 public:
  Trainer(const Ort::Env& env, const std::filesystem::path& path, const Ort::SessionOptions& options)
      : session_(env, path.c_str(), options) {
    for (const std::string& name : session_.GetOutputNames()) {
      if (name.size() > kUpdated.size() && name.substr(name.size() - kUpdated.size()) == kUpdated) {
        changed_.push_back(name.substr(0, name.size() - kUpdated.size()));
      }
    }
  }

  // Returns the loss.
  float Step(const Ort::Value& image, const Ort::Value& target) {
    Ort::IoBinding binding(session_);
    binding.BindInput("image", image);
    binding.BindInput("target", target);
    for (const auto& [name, value] : values_) binding.BindInput(name.c_str(), value);
    binding.BindOutput("loss", Cpu());
    for (const std::string& name : changed_) binding.BindOutput((name + std::string(kUpdated)).c_str(), Cpu());
    session_.Run(Ort::RunOptions(), binding);

    std::vector<Ort::Value> outputs = binding.GetOutputValues();
    for (size_t i = 0; i < changed_.size(); ++i) values_.insert_or_assign(changed_[i], std::move(outputs[i + 1]));
    return *outputs[0].GetTensorData<float>();
  }

  // By the names of the model's inputs. What is not there yet has its default in the file.
  std::map<std::string, Ort::Value>& values() { return values_; }

 private:
  Ort::Session session_;
  std::vector<std::string> changed_;
  std::map<std::string, Ort::Value> values_;
};

// What the module gives in eval mode.
Ort::Value Evaluate(Ort::Session& model, const std::map<std::string, Ort::Value>& values, const Ort::Value& image) {
  Ort::IoBinding binding(model);
  for (const std::string& name : model.GetInputNames()) {
    binding.BindInput(name.c_str(), name == "image" ? image : values.at(name));
  }
  binding.BindOutput(model.GetOutputNames()[0].c_str(), Cpu());
  model.Run(Ort::RunOptions(), binding);
  return std::move(binding.GetOutputValues()[0]);
}

// Writes a safetensors file: a header in JSON, padded to eight bytes, and the tensors' bytes.
void Save(const std::filesystem::path& path, const std::map<std::string, Ort::Value>& values) {
  std::string header, bytes;
  for (const auto& [name, value] : values) {
    const auto info = value.GetTensorTypeAndShapeInfo();
    const bool is_float = info.GetElementType() == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    if (!is_float && info.GetElementType() != ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64) {
      throw std::runtime_error(name + ": is neither float nor int64");
    }
    std::string shape;
    for (int64_t length : info.GetShape()) shape += (shape.empty() ? "" : ",") + std::to_string(length);
    header += (header.empty() ? "{\"" : ",\"") + name + "\":{\"dtype\":\"" + (is_float ? "F32" : "I64") +
              "\",\"shape\":[" + shape + "],\"data_offsets\":[" + std::to_string(bytes.size());
    bytes.append(static_cast<const char*>(value.GetTensorRawData()), info.GetElementCount() * (is_float ? 4 : 8));
    header += "," + std::to_string(bytes.size()) + "]}";
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const uint64_t size = header.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&size), sizeof size) << header << bytes;
  if (!file.flush()) throw std::runtime_error(path.string() + ": cannot be written");
}

template <typename T>
std::vector<T> Read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path.string() + ": cannot be read");
  std::vector<T> elements(std::filesystem::file_size(path) / sizeof(T));
  file.read(reinterpret_cast<char*>(elements.data()), static_cast<std::streamsize>(elements.size() * sizeof(T)));
  return elements;
}

void Train(const std::filesystem::path& folder, int epochs, const std::filesystem::path& library) {
  auto images = Read<float>(folder / "train_images.bin"), test_images = Read<float>(folder / "test_images.bin");
  auto labels = Read<int64_t>(folder / "train_labels.bin"), test_labels = Read<int64_t>(folder / "test_labels.bin");
  const auto count = static_cast<int64_t>(labels.size()), test_count = static_cast<int64_t>(test_labels.size());

  // At the level of warnings onnxruntime names each input that has a default value.
  Ort::Env env(ORT_LOGGING_LEVEL_ERROR);
  Ort::SessionOptions options;
  if (!library.empty()) options.RegisterCustomOpsLibrary(library.c_str());
  Trainer trainer(env, folder / "step.onnx", options);
  float learning_rate = 2e-3F;  // may change between steps
  trainer.values().emplace("learning_rate", View(&learning_rate, {}));
  Ort::Session evaluation(env, (folder / "step.eval.onnx").c_str(), options);

  for (int epoch = 1; epoch <= epochs; ++epoch) {
    double sum = 0;
    int steps = 0;
    // The digits lie in random order.
    for (int64_t row = 0; row < count; row += kBatchSize, ++steps) {
      const int64_t rows = std::min(kBatchSize, count - row);
      sum += trainer.Step(View(&images[row * kPixels], {rows, 1, 8, 8}), View(&labels[row], {rows}));
    }
    const Ort::Value scores = Evaluate(evaluation, trainer.values(), View(test_images.data(), {test_count, 1, 8, 8}));
    const float* row = scores.GetTensorData<float>();
    int right = 0;
    for (int64_t label : test_labels) {
      right += std::max_element(row, row + kClasses) - row == label;
      row += kClasses;
    }
    std::printf("epoch %d: loss %.6f, test accuracy %.2f%%\n", epoch, sum / steps, 100.0 * right / test_count);
  }
  Save(folder / "trained.safetensors", trainer.values());
}

}  // namespace

int main(int argc, char** argv) {
  const int epochs = argc > 2 ? std::atoi(argv[2]) : 0;
  if (epochs < 1 || argc > 4) {
    std::fprintf(stderr, "usage: %s FOLDER EPOCHS [LIBRARY]\n", argv[0]);
    return 2;
  }
  try {
    Train(argv[1], epochs, argc == 4 ? argv[3] : "");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
    return 1;
  }
}
