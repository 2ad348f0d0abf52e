#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gradfuse/parallel.h"
#include "gradfuse/queue.h"
#include "gradfuse/signature.h"

// Declares what an op has beside the struct of its arguments:
//
//   Check           whether inputs and attributes are ones that it takes
//   OutputShapes    of checked arguments
//   cpu::Run        of checked arguments with their outputs
//   cuda::Run       the same, of arguments in device memory; inputs that are ReadByHost are in host memory
//   WorkspaceBytes  device memory that cuda::Run needs beside them
#define GRADFUSE_DECLARE_OP(Args)                          \
  Status Check(const Args& args);                          \
  std::vector<Shape> OutputShapes(const Args& args);       \
  namespace cpu {                                          \
  void Run(const Args& args, const ParallelFor& parallel); \
  }                                                        \
  namespace cuda {                                         \
  int64_t WorkspaceBytes(const Args& args);                \
  Status Run(const Args& args, const Queue& queue);        \
  }
