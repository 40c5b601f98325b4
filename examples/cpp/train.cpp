// Train a folder of Trainer.export_training in C++, and write the state for Trainer.import_state.
//
//     train FOLDER EPOCHS ROWS STATE FILE.npy ...
//
// ROWS is the batch size, STATE the file to write. Each input of train.onnx with the role x, y or
// sample_weight has an .npy file, in their order. docs/training-folder.md describes the folder.
#include <cstdio>
#include <cstring>

#include "checks.h"
#include "onnxruntime_c_api.h"

static const OrtApi* const api = OrtGetApiBase()->GetApi(ORT_API_VERSION);

static void check(OrtStatus* status) {
  if (status) throw std::runtime_error(api->GetErrorMessage(status));
}

struct Training {
  Json manifest;
  Bytes file;                                  // of the state, whose tensors change in place
  std::map<std::string, Tensor> state;         // tensors in `file`
  std::map<std::string, Tensor> counters;      // those that this program counts, by their last name
  std::map<std::string, std::string> updated;  // output of the step -> tensor of the state
  OrtSession* session = nullptr;
  OrtMemoryInfo* memory = nullptr;

  explicit Training(const std::string& folder) {
    const Bytes text = read(folder + "/manifest.json");
    manifest = Json::parse({text.data(), text.size()});
    require(manifest["version"].text == "1", "the manifest has another version");
    require(!manifest["graphs"].has("scalars"), "write the folder with target=\"onnxruntime\"");
    require(std::string(&text[0], text.size()).find("\"schedule\": {") + 1 == 0, "it has a schedule");
    file = read(folder + "/state.safetensors");
    const uint64_t size = *reinterpret_cast<uint64_t*>(file.data());
    const Json header = Json::parse({&file[8], &file[8] + size});
    for (const Json& entry : manifest["state"].items) {
      const std::string& name = entry["name"].text;
      const int64_t offset = header[name]["data_offsets"].items.at(0).integer();
      Tensor tensor{&TYPES.at(entry["type"].text), {}, &file[8 + size + offset]};
      for (const Json& length : entry["shape"].items) tensor.shape.push_back(length.integer());
      if (entry["kind"].text == "counter") counters[name.substr(name.rfind('/') + 1)] = tensor;
      if (!entry["output"].null()) updated[entry["output"].text] = name;
      state[name] = tensor;
    }
    OrtEnv* env = nullptr;
    OrtSessionOptions* options = nullptr;
    check(api->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "train", &env));
    check(api->CreateSessionOptions(&options));
    check(api->CreateSession(env, (folder + "/train.onnx").c_str(), options, &session));
    check(api->CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeDefault, &memory));
  }

  const Json& graph() const { return manifest["graphs"]["train"]; }

  // One step on a batch, after which the state is the next one; its loss.
  double step(const std::map<std::string, Tensor>& batch, int64_t rows) {
    double rate = counters.at("learning_rate").scalar<double>();
    float float_rate = float(rate);
    int64_t seed = manifest["random"]["seed"].integer();
    std::vector<const char*> inputs, outputs;
    std::vector<OrtValue*> fed;
    for (const Json& input : graph()["inputs"].items) {
      const std::string& name = input["name"].text;
      const std::string& role = input["role"].text;
      Tensor tensor{&TYPES.at(input["type"].text), {}, nullptr};
      if (role == "state") tensor = state.at(name);
      else if (role == "step") tensor = counters.at("global_step");
      else if (role == "seed") tensor.data = reinterpret_cast<char*>(&seed);
      else if (role != "learning_rate") tensor = batch.at(name);
      else if (tensor.type->bytes == 8) tensor.data = reinterpret_cast<char*>(&rate);
      else tensor.data = reinterpret_cast<char*>(&float_rate);
      inputs.push_back(name.c_str());
      fed.push_back(nullptr);
      check(api->CreateTensorWithDataAsOrtValue(
          memory, tensor.data, tensor.bytes(), tensor.shape.data(), tensor.shape.size(),
          tensor.type->element, &fed.back()));
    }
    const std::vector<Json>& described = graph()["outputs"].items;
    for (const Json& output : described) outputs.push_back(output["name"].text.c_str());
    std::vector<OrtValue*> results(outputs.size());
    check(api->Run(session, nullptr, inputs.data(), fed.data(), fed.size(), outputs.data(),
                   outputs.size(), results.data()));
    double loss = 0;
    for (size_t i = 0; i < results.size(); ++i) {
      void* data;
      check(api->GetTensorMutableData(results[i], &data));
      const auto target = updated.find(outputs[i]);
      if (target != updated.end())
        std::memcpy(state.at(target->second).data, data, state.at(target->second).bytes());
      else if (described[i]["role"].text == "loss")
        loss = described[i]["type"].text == "float64" ? *static_cast<double*>(data)
                                                      : *static_cast<float*>(data);
      api->ReleaseValue(results[i]);
    }
    for (OrtValue* value : fed) api->ReleaseValue(value);
    for (const char* name : {"global_step", "global_batch"}) ++counters.at(name).scalar<int64_t>();
    counters.at("samples_seen").scalar<int64_t>() += rows;
    return loss;
  }

  // One pass over the data; its mean loss, which weights each batch by its rows.
  double epoch(const std::map<std::string, Tensor>& arrays, size_t batch_rows) {
    const size_t rows = arrays.begin()->second.shape.at(0);
    int64_t& epoch = counters.at("epoch").scalar<int64_t>();
    const auto order = permutation(manifest["order"]["seed"].integer(), epoch, rows);
    double sum = 0, seen = 0;
    for (size_t from = 0; from < rows; from += batch_rows) {
      const size_t taken = std::min(batch_rows, rows - from);
      if (taken < batch_rows && !manifest["batch"]["rows"].null()) break;  // its rows are fixed
      std::map<std::string, Bytes> gathered;
      std::map<std::string, Tensor> batch;
      for (const auto& [name, array] : arrays) {
        const size_t row = array.bytes() / rows;
        Bytes& bytes = gathered[name];
        for (size_t i = from; i < from + taken; ++i)
          bytes.insert(bytes.end(), array.data + order[i] * row, array.data + (order[i] + 1) * row);
        batch[name] = {array.type, array.shape, bytes.data()};
        batch[name].shape[0] = taken;
      }
      sum += step(batch, taken) * taken;
      seen += taken;
    }
    ++epoch;
    return sum / seen;
  }
};

int main(int count, char** arguments) try {
  require(count > 5, "usage: train FOLDER EPOCHS ROWS STATE FILE.npy ...");
  Training training(arguments[1]);
  std::vector<const Json*> inputs;
  for (const Json& input : training.graph()["inputs"].items)
    for (const char* role : {"x", "y", "sample_weight"})
      if (input["role"].text == role) inputs.push_back(&input);
  require(inputs.size() + 5 == size_t(count), "expected an .npy file for each input of the data");
  std::vector<Bytes> files;
  for (int i = 5; i < count; ++i) files.push_back(read(arguments[i]));
  std::map<std::string, Tensor> arrays;
  for (size_t i = 0; i < inputs.size(); ++i)
    arrays[(*inputs[i])["name"].text] =
        checked_array(files[i], arguments[5 + i], *inputs[i], training.manifest);
  const int epochs = std::stoi(arguments[2]), rows = std::max(1, std::stoi(arguments[3]));
  for (int epoch = 0; epoch < epochs; ++epoch)
    std::printf("epoch %d: loss %.9g\n", epoch + 1, training.epoch(arrays, rows));
  std::ofstream(arguments[4], std::ios::binary).write(training.file.data(), training.file.size());
} catch (const std::exception& error) {
  std::fprintf(stderr, "train: %s\n", error.what());
  return 1;
}
