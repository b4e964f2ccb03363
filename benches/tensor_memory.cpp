// An allocator for torch's CPU tensors that hands out the memory of that size which was freed last.
//
// So a bench knows which memory the next output will lie in, and can put it into a known state; and no output is made
// of new pages, whose supply by the system would be most of what is timed. Small tensors come from torch's own allocator.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

namespace {

constexpr size_t kPage = 4096, kSmallest = 16 * kPage, kLargestKept = size_t{1} << 30;

struct Blocks {
    std::mutex lock;
    std::map<size_t, std::vector<void*>> freed;
    std::unordered_map<void*, size_t> lent;
};

Blocks& blocks() {
    static Blocks* all = new Blocks;  // Tensors may outlive static objects.
    return *all;
}

void* take(size_t bytes) {
    Blocks& all = blocks();
    std::lock_guard<std::mutex> guard(all.lock);
    auto& freed = all.freed[bytes];
    void* block;
    if (!freed.empty()) {
        block = freed.back();
        freed.pop_back();
    } else {
        block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (block == MAP_FAILED) throw std::bad_alloc();
    }
    all.lent[block] = bytes;
    return block;
}

void give_back(void* block) {
    if (block == nullptr) return;
    Blocks& all = blocks();
    std::lock_guard<std::mutex> guard(all.lock);
    const auto found = all.lent.find(block);
    const size_t bytes = found->second;
    all.lent.erase(found);
    if (bytes > kLargestKept) {
        munmap(block, bytes);
    } else {
        all.freed[bytes].push_back(block);
    }
}

class RecyclingAllocator final : public c10::Allocator {
  public:
    explicit RecyclingAllocator(c10::Allocator* small) : small_(small) {}

    c10::DataPtr allocate(size_t bytes) override {
        if (bytes < kSmallest) return small_->allocate(bytes);
        void* block = take((bytes + kPage - 1) / kPage * kPage);
        return {block, block, &give_back, c10::Device(c10::DeviceType::CPU)};
    }

    void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

  private:
    c10::Allocator* small_;
};

}  // namespace

// Takes the place of torch's allocator, for the rest of the process.
extern "C" void recycle_tensor_memory() {
    static auto* allocator = new RecyclingAllocator(c10::GetCPUAllocator());
    c10::SetCPUAllocator(allocator, /*priority=*/1);
}

// Gives the memory of freed tensors back to the system.
extern "C" void release_tensor_memory() {
    Blocks& all = blocks();
    std::lock_guard<std::mutex> guard(all.lock);
    for (auto& [bytes, freed] : all.freed) {
        for (void* block : freed) munmap(block, bytes);
    }
    all.freed.clear();
}
