// One fault on purpose (the argument: which), for a build under sanitizers: whoever runs this looks for the report.
#include "check.h"
#include "dgr_probe.h"

int main(int argc, char ** argv) {
    CHECK(argc == 2);
    CHECK(dgr_probe_fault(atoi(argv[1])) == DGR_OK);
    fprintf(stderr, "nothing was seen\n");
}
