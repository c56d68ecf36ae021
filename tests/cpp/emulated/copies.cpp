// What fills shared memory, or leaves it, while threads go on.

#include <algorithm>
#include <array>
#include <cstring>

#include "machine.h"
#include "state.h"

namespace emulated {
namespace {

constexpr int kPiece = 16;  // bytes that a swizzle moves together

// Bits of an address that say which of the swizzle's lines it is in are added to those of the piece.
Address swizzled(Address address, int swizzle_bytes) {
  return swizzle_bytes == 0 ? address : address ^ ((address >> 7) % (swizzle_bytes / kPiece) * kPiece);
}

int row_bytes(CUtensorMap const& map) { return static_cast<int>(map.box[0]) * map.element_bytes; }

// `use(place, data, bytes)` for each piece of a box: where it is in shared memory, and so many bytes of it in memory.
template <class Use>
void for_pieces(CUtensorMap const& map, Address place, int column, int row, Use use) {
  auto const end = static_cast<std::int64_t>(map.sizes[0]) * map.element_bytes;
  for (int i = 0; i < static_cast<int>(map.box[1]); ++i) {
    bool const has_row = row + i >= 0 && row + i < static_cast<std::int64_t>(map.sizes[1]);
    for (int byte = 0; byte < row_bytes(map); byte += kPiece) {
      std::int64_t const from = std::int64_t{column} * map.element_bytes + byte;
      int const known = has_row && from >= 0 ? static_cast<int>(std::clamp<std::int64_t>(end - from, 0, kPiece)) : 0;
      unsigned char* const data = known > 0 ? map.data + (row + i) * map.stride + from : nullptr;
      use(swizzled(place + i * row_bytes(map) + byte, map.swizzle_bytes), data, known);
    }
  }
}

void check_box(CUtensorMap const& map, int column, Address place) {
  if (place % 128 != 0) Machine::now().fail("has a box that does not begin on 128 bytes of shared memory");
  if (column * map.element_bytes % kPiece != 0)
    Machine::now().fail("has a box that does not begin on 16 bytes of memory");
}

}  // namespace

unsigned char* dynamic_smem() { return Machine::now().thread().block->memory; }

Address address_of(void const* shared) {
  auto const offset = static_cast<unsigned char const*>(shared) - dynamic_smem();
  if (offset < 0 || offset >= 1 << kRankBit) Machine::now().fail("takes other memory for shared memory");
  return static_cast<Address>(offset);
}

unsigned char* memory_at(Address address, int bytes) {
  Machine& machine = Machine::now();
  machine.may_pause();
  return machine.memory(machine.global(address), bytes);
}

Address dsmem_address(Address address, int rank) { return address | (rank + 1) << kRankBit; }
int rank_in_cluster() { return static_cast<int>(Machine::now().thread().block->rank); }

void copy_small(Address to, void const* from, int bytes, int filled) {
  Machine& machine = Machine::now();
  auto const copy = [=, to = machine.global(to)] {
    unsigned char* const place = Machine::now().memory(to, std::max(bytes, filled));
    std::memset(place, 0, filled);
    std::memcpy(place, from, bytes);
  };
  machine.issue({Kind::kSmallCopy, copy, &machine.thread().copies});
}
void commit_small_copies() {
  Machine& machine = Machine::now();
  machine.end_group(Kind::kSmallCopy, machine.thread().copies);
}
void wait_for_small_copies(int pending) {
  Machine& machine = Machine::now();
  Stream& stream = machine.thread().copies;
  machine.await(stream, stream.groups, pending, "cp.async");
}

void st_async(Address to, void const* value, int bytes, Address barrier) {
  Machine& machine = Machine::now();
  std::array<unsigned char, kPiece> sent{};
  std::memcpy(sent.data(), value, bytes);
  machine.issue({Kind::kSend, [=, to = machine.global(to), barrier = machine.global(barrier)] {
                   std::memcpy(Machine::now().memory(to, bytes), sent.data(), bytes);
                   complete_bytes(barrier, bytes);
                 }});
  machine.may_pause();
}

void load_box(Address to, CUtensorMap const& map, int column, int row, Address barrier, unsigned ranks) {
  Machine& machine = Machine::now();
  check_box(map, column, to);
  unsigned const own = 1u << machine.thread().block->rank;
  for (unsigned rank = 0, left = ranks == 0 ? own : ranks; left != 0; ++rank, left >>= 1) {
    if (left % 2 == 0) continue;
    Address const there = dsmem_address(to, rank), tells = dsmem_address(barrier, rank);
    machine.issue({Kind::kLoad, [=] {
                     for_pieces(map, there, column, row, [](Address place, unsigned char const* data, int known) {
                       unsigned char* const piece = Machine::now().memory(place, kPiece);
                       std::memset(piece, 0, kPiece);
                       std::copy_n(data, known, piece);
                     });
                     complete_bytes(tells, row_bytes(map) * static_cast<int>(map.box[1]));
                   }});
  }
  machine.may_pause();
}

void load_bytes(Address to, void const* from, int bytes, Address barrier) {
  Machine& machine = Machine::now();
  machine.issue({Kind::kLoad, [=, to = machine.global(to), barrier = machine.global(barrier)] {
                   std::memcpy(Machine::now().memory(to, bytes), from, bytes);
                   complete_bytes(barrier, bytes);
                 }});
  machine.may_pause();
}

// Shared memory is read at some time, memory written at a later one: whole pieces, if but a byte of one is inside.
void tma_store(CUtensorMap const& map, int column, int row, Address from) {
  Machine& machine = Machine::now();
  check_box(map, column, from);
  auto const read = [=, from = machine.global(from)] {
    std::vector<std::array<unsigned char, kPiece>> pieces;
    for_pieces(map, from, column, row, [&](Address place, unsigned char*, int) {
      std::memcpy(pieces.emplace_back().data(), Machine::now().memory(place, kPiece), kPiece);
    });
    Machine::now().issue({Kind::kStore, [=] {
                            auto piece = pieces.begin();
                            for_pieces(map, from, column, row, [&](Address, unsigned char* data, int known) {
                              if (known > 0) std::memcpy(data, piece->data(), kPiece);
                              ++piece;
                            });
                          }});
  };
  machine.issue({Kind::kStore, read, &machine.thread().stores});
}
void tma_store_commit() {
  Machine& machine = Machine::now();
  machine.end_group(Kind::kStore, machine.thread().stores);
}
void tma_store_wait(int pending) {
  Machine& machine = Machine::now();
  Stream& stream = machine.thread().stores;
  machine.await(stream, stream.groups, pending, "TMA's stores");
}

}  // namespace emulated
