#include <cuda_runtime_api.h>

#include <cstdio>

#include "tests/device/device_api.h"

int gradfuse_device_name(char* text, size_t size) {
  int device = 0;
  cudaDeviceProp properties;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaGetDeviceProperties(&properties, device);
  std::snprintf(text, size, "%s", error == cudaSuccess ? properties.name : cudaGetErrorString(error));
  return error;
}

void* gradfuse_device_allocate(size_t bytes) {
  void* memory = nullptr;
  return cudaMalloc(&memory, bytes) == cudaSuccess ? memory : nullptr;
}

int gradfuse_device_free(void* memory) { return cudaFree(memory); }

int gradfuse_device_upload(void* device, const void* host, size_t bytes) {
  return cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice);
}

int gradfuse_device_download(void* host, const void* device, size_t bytes) {
  return cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost);
}

int gradfuse_device_fill(void* device, int byte, size_t bytes) { return cudaMemset(device, byte, bytes); }

int gradfuse_device_copy(void* to, const void* from, size_t bytes) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, nullptr);
}

int gradfuse_device_synchronize() { return cudaDeviceSynchronize(); }

void* gradfuse_device_event() {
  cudaEvent_t event = nullptr;
  return cudaEventCreate(&event) == cudaSuccess ? event : nullptr;
}

int gradfuse_device_record(void* event) { return cudaEventRecord(static_cast<cudaEvent_t>(event), nullptr); }

int gradfuse_device_elapsed(void* first, void* last, float* milliseconds) {
  const cudaError_t error = cudaEventSynchronize(static_cast<cudaEvent_t>(last));
  if (error != cudaSuccess) return error;
  return cudaEventElapsedTime(milliseconds, static_cast<cudaEvent_t>(first), static_cast<cudaEvent_t>(last));
}
