// torch's own CUDA caching allocator over a driver made of counters, so that it runs where there is no device.
//
// It reads the calls of random_calls.py from standard input and writes the lines that run_on_model() makes. The functions
// of the CUDA runtime that libc10_cuda.so looks for are found here first. test_real_allocator.py builds and runs it where
// a CUDA build of torch, its headers and a compiler are at hand.
//
//     real_allocator CAPACITY_BYTES [MEMORY_FRACTION]

#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/cuda/PeerToPeerAccess.h>
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <iostream>
#include <map>
#include <string>
#include <unistd.h>

namespace {

size_t capacity = 0;
size_t used = 0;
size_t next_address = 0x700000000000;
std::map<size_t, size_t> segments; // by address
std::map<size_t, size_t> pages; // by handle

struct Event {
  size_t stream = 0;
  bool done = true;
};
std::map<size_t, Event> events; // by handle

size_t take_addresses(size_t size) {
  constexpr size_t granule = 2 << 20;
  const size_t address = next_address;
  next_address += (size + granule - 1) / granule * granule;
  return address;
}

bool take_memory(size_t size) {
  if (used + size > capacity) {
    return false;
  }
  used += size;
  return true;
}

} // namespace

extern "C" {

cudaError_t cudaMalloc(void** address, size_t size) {
  if (!take_memory(size)) {
    return cudaErrorMemoryAllocation;
  }
  const size_t start = take_addresses(size);
  segments[start] = size;
  *address = reinterpret_cast<void*>(start);
  return cudaSuccess;
}
cudaError_t cudaFree(void* address) {
  if (address != nullptr) {
    const auto found = segments.find(reinterpret_cast<size_t>(address));
    used -= found->second;
    segments.erase(found);
  }
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = capacity - used;
  *total = capacity;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  memset(static_cast<void*>(properties), 0, sizeof(*properties));
  properties->totalGlobalMem = capacity;
  properties->major = 9;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "no device here"; }
const char* cudaGetErrorName(cudaError_t) { return "no device here"; }
cudaError_t cudaDriverGetVersion(int* version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = *greatest = 0; return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  const size_t handle = events.size() + 1;
  events[handle] = {};
  *event = reinterpret_cast<cudaEvent_t>(handle);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  events[reinterpret_cast<size_t>(event)] = {reinterpret_cast<size_t>(stream), false};
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return events[reinterpret_cast<size_t>(event)].done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  events[reinterpret_cast<size_t>(event)].done = true;
  return cudaSuccess;
}

CUresult reserve_addresses(CUdeviceptr* address, size_t size, size_t, CUdeviceptr, unsigned long long) {
  *address = take_addresses(size);
  return CUDA_SUCCESS;
}
CUresult create_page(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp*, unsigned long long) {
  static size_t next_handle = 1;
  if (!take_memory(size)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  pages[next_handle] = size;
  *handle = next_handle++;
  return CUDA_SUCCESS;
}
CUresult release_page(CUmemGenericAllocationHandle handle) {
  used -= pages.at(handle);
  pages.erase(handle);
  return CUDA_SUCCESS;
}
CUresult get_attribute(int* value, int, int) { *value = 0; return CUDA_SUCCESS; }
CUresult do_nothing() { return CUDA_SUCCESS; }

cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** entry, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  const std::map<std::string, void*> known{
      {"cuMemAddressReserve", reinterpret_cast<void*>(reserve_addresses)},
      {"cuMemCreate", reinterpret_cast<void*>(create_page)},
      {"cuMemRelease", reinterpret_cast<void*>(release_page)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(get_attribute)}};
  const auto found = known.find(name);
  *entry = found == known.end() ? reinterpret_cast<void*>(do_nothing) : found->second;
  if (result != nullptr) {
    *result = cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}

} // extern "C"

namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*)(c10::DeviceIndex)); // in no public header
}

namespace {

namespace allocators = c10::cuda::CUDACachingAllocator;

c10::cuda::CUDAStream stream_of(size_t stream) {
  return stream == 0 ? c10::cuda::getDefaultCUDAStream(0)
                     : c10::cuda::getStreamFromExternal(reinterpret_cast<cudaStream_t>(stream), 0);
}

void print_stats(allocators::CUDAAllocator& allocator) {
  const auto stats = allocator.getDeviceStats(0);
  printf("S");
  for (const auto* stat : {&stats.requested_bytes, &stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes}) {
    printf(" %ld %ld", (long)(*stat)[0].current, (long)(*stat)[0].peak);
  }
  printf(" %ld %ld", (long)stats.segment[0].current, (long)stats.segment[0].peak);
  for (const auto count :
       {stats.num_alloc_retries, stats.num_ooms, stats.num_device_alloc, stats.num_device_free, stats.num_sync_all_streams}) {
    printf(" %ld", (long)count);
  }
  printf("\n");
}

} // namespace

int main(int n_arguments, char** arguments) {
  capacity = strtoull(arguments[1], nullptr, 10);
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  c10::cuda::detail::init_p2p_access_cache(1);
  allocators::CUDAAllocatorConfig::set_expandable_segments_handle_type(
      allocators::Expandable_Segments_Handle_Type::POSIX_FD);
  auto& allocator = *allocators::get();
  allocator.init(1);
  allocator.attachAllocatorTraceTracker([](const auto& entry) {
    constexpr const char* names[] = {
        "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
        "segment_map", "segment_unmap", "snapshot", "oom"};
    printf("T %s %zu %zu %zu\n", names[static_cast<int>(entry.action_)], entry.addr_, entry.size_,
           reinterpret_cast<size_t>(entry.stream_));
  });
  if (n_arguments > 2) {
    allocator.setMemoryFraction(strtod(arguments[2], nullptr), 0);
  }

  std::map<size_t, c10::DataPtr> live;
  size_t n_blocks = 0;
  char action = 0;
  size_t first = 0;
  size_t second = 0;
  while (std::cin >> action >> first >> second) {
    if (action == 'm') {
      c10::cuda::setCurrentCUDAStream(stream_of(second));
      try {
        auto block = allocator.allocate(first);
        printf("M %zu\n", reinterpret_cast<size_t>(block.get()));
        live[n_blocks] = std::move(block);
      } catch (const c10::OutOfMemoryError&) {
        printf("M oom\n");
      }
      n_blocks++;
    } else if (action == 'f') {
      live.erase(first);
    } else if (action == 'r' && live.count(first) > 0) {
      allocator.recordStream(live.at(first), stream_of(second));
    } else if (action == 's') {
      for (auto& [handle, event] : events) {
        event.done = event.done || event.stream == first;
      }
    } else if (action == 'e') {
      allocator.emptyCache({0, 0});
    } else if (action == 'p') {
      allocator.resetPeakStats(0);
    }
    print_stats(allocator);
  }
  fflush(stdout);
  _exit(0); // the destructors of libraries would look for a device
}
