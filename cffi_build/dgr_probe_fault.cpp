// What sanitizers must see, done on purpose in builds that have them.
#include "dgr_probe.h"

#include "dgr_internal.h"

#include <climits>
#include <cstring>
#include <thread>
#include <vector>

#ifndef DGR_SANITIZE
#define DGR_SANITIZE "" // CMake says it where there are any
#endif

namespace dgr {

namespace {

volatile int sink; // results end here, or nothing would be computed
volatile int one = 1;
int shared;

const char * sanitizer_of(int32_t kind) {
    switch (kind) {
        case DGR_FAULT_OVERRUN:
        case DGR_FAULT_FREED: return "address";
        case DGR_FAULT_OVERFLOW:
        case DGR_FAULT_SHIFT: return "undefined";
        case DGR_FAULT_RACE: return "thread";
        default: refuse("kind is %d, must be in 0..%d", kind, DGR_FAULT_RACE);
    }
}

void fault(int32_t kind) {
    switch (kind) {
        case DGR_FAULT_OVERRUN: {
            const std::vector<char> block(16);
            sink = block.data()[16 * one];
            break;
        }
        case DGR_FAULT_FREED: {
            auto block        = std::make_unique<std::vector<char>>(16);
            const char * data = block->data();
            block.reset();
            sink = data[one];
            break;
        }
        case DGR_FAULT_OVERFLOW: sink = INT_MAX + one; break;
        case DGR_FAULT_SHIFT: sink = one << (one + 31); break;
        case DGR_FAULT_RACE: {
            std::thread other([] { shared += 1; });
            shared += 1;
            other.join();
            sink = shared;
            break;
        }
    }
}

} // namespace

} // namespace dgr

int32_t dgr_probe_fault(int32_t kind) {
    return dgr::guarded([&] {
        const char * sanitizer = dgr::sanitizer_of(kind);
        if (!strstr(DGR_SANITIZE, sanitizer)) {
            dgr::refuse("this build is not under the sanitizer %s: DGR_SANITIZE=%s makes one", sanitizer, sanitizer);
        }
        dgr::fault(kind);
    });
}
