// Optimiser steps of two networks that share no weight, see PairedSteps in paired_steps.py.
//
// Two threads call `train`, one for each network, or one thread calls it for both. In each step a
// network computes its gradients with compiled code, waits for those of the other, because the norm
// of all gradients clips them, and changes its own weights.

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <thread>

namespace {

// Columns at the end of a row of statistics: STEP_STATISTICS of compiled_step.py.
enum { LOSS = -5, ROWS = -4, ACTOR_NORM = -3, CRITIC_NORM = -2, FINITE = -1 };

// A thread that waits for the other one looks so many times before it lets other threads run.
constexpr int SPINS = 2000;

}  // namespace

extern "C" {

// Functions of the compiled program, and of torch's C interface (aoti_torch/c/shim.h).
typedef int32_t (*Run)(void*, void**, size_t, void**, size_t, void*, void*);
typedef int32_t (*Copy)(void*, void**);
typedef int32_t (*Pointer)(void*, void**);
typedef int32_t (*Delete)(void*);

struct Network {
  Run run;
  void* model;
  void** inputs;        // tensors of the program; that at place `index` differs in each step
  int64_t input_count;
  int64_t parameters;   // the program returns statistics, then the gradients of so many parameters
  void** results;       // memory for them
  int64_t* sizes;       // elements of each parameter
  float** weights;      // parameters, first moments, second moments
  float* row;           // statistics of the newest step
};

struct Steps {
  Copy copy;
  Pointer pointer;
  Delete free_tensor;
  void** indices;       // samples of each step
  int64_t index;
  int64_t count;        // steps
  int64_t columns;      // statistics of a step
  int64_t settings_columns;
  float* settings;      // [count, settings_columns], see adamw_settings
  float* rows;          // [count, columns], the result
  float beta1_rest, lerp, beta2, beta2_rest, eps, max_norm;  // rest: 1 - beta; max_norm < 0: none
  std::atomic<int64_t> done[2];  // steps whose gradients are complete
  std::atomic<int64_t> failed;
};

static bool gradients(Steps& s, Network& n, int64_t step) {
  // The program frees the tensors that it receives.
  void* inputs[n.input_count];
  for (int64_t i = 0; i < n.input_count; ++i)
    if (s.copy(i == s.index ? s.indices[step] : n.inputs[i], &inputs[i])) return false;
  if (n.run(n.model, inputs, n.input_count, n.results, n.parameters + 1, nullptr, nullptr))
    return false;
  void* row;
  if (s.pointer(n.results[0], &row)) return false;
  for (int64_t i = 0; i < s.columns; ++i) n.row[2 * i + (step & 1)] = static_cast<float*>(row)[i];
  return true;
}

// AdamW as in adamw_step of compiled_step.py, with the same order of operations.
static bool change_weights(Steps& s, Network& n, const float* setting, float scale) {
  const float step = setting[0], inv = setting[2], decay = setting[4];
  for (int64_t k = 0; k < n.parameters; ++k) {
    void* result;
    if (s.pointer(n.results[k + 1], &result)) return false;
    const float* grad = static_cast<float*>(result);
    float *p = n.weights[k], *m = n.weights[n.parameters + k], *v = n.weights[2 * n.parameters + k];
    for (int64_t i = 0; i < n.sizes[k]; ++i) {
      const float g = grad[i] * scale;
      const float base = s.beta1_rest < 0.5f ? m[i] : g;  // as torch.lerp
      m[i] = s.lerp * (g - m[i]) + base;
      v[i] = v[i] * s.beta2 + g * g * s.beta2_rest;
      p[i] = p[i] * (1.0f - decay) - step * m[i] / (std::sqrt(v[i]) * inv + s.eps);
    }
  }
  return true;
}

// Takes the steps for the networks first <= i < last of two. Returns the number of steps, of which
// the last one changed no weight if its loss or a gradient is not finite; -1 if a program failed.
int64_t train(Steps* steps, Network* networks, int64_t first, int64_t last) {
  Steps& s = *steps;
  for (int64_t step = 0; step < s.count; ++step) {
    for (int64_t i = first; i < last; ++i) {
      if (!gradients(s, networks[i], step)) s.failed.store(1);
      s.done[i].store(step + 1, std::memory_order_release);
    }
    for (int i = 0, spins = 0; i < 2; ++i)
      while (s.done[i].load(std::memory_order_acquire) <= step && !s.failed.load())
        if (++spins > SPINS) std::this_thread::yield();
    if (s.failed.load()) return -1;
    // Each network has filled its own columns and left 0 in those of the other.
    float row[s.columns];
    float* end = row + s.columns;
    for (int64_t i = 0; i < s.columns; ++i)
      row[i] = networks[0].row[2 * i + (step & 1)] + networks[1].row[2 * i + (step & 1)];
    const float norm = std::hypot(end[ACTOR_NORM], end[CRITIC_NORM]);
    end[FINITE] = norm + end[LOSS];
    if (first == 0)
      for (int64_t i = 0; i < s.columns; ++i) s.rows[step * s.columns + i] = row[i];
    const bool finite = std::isfinite(end[FINITE]);
    float scale = 1.0f;
    if (s.max_norm >= 0 && s.max_norm / (norm + 1e-6f) < 1.0f) scale = s.max_norm / (norm + 1e-6f);
    for (int64_t i = first; i < last; ++i) {
      Network& n = networks[i];
      // A step with a gradient of 0 would still move the weights, by AdamW's momentum.
      if (finite && end[ROWS] > 0)
        if (!change_weights(s, n, s.settings + step * s.settings_columns + i, scale))
          s.failed.store(1);
      for (int64_t k = 0; k <= n.parameters; ++k) s.free_tensor(n.results[k]);
    }
    if (!finite) return step + 1;
  }
  return s.count;
}

}  // extern "C"
