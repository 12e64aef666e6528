//! Prevents a QEMU process from opening network connections, so that a guest that escapes from it reaches neither the
//! API nor other hosts. Its tap devices and sockets are opened by the daemon and inherited. See docs/decisions/0040.

#![allow(unsafe_code, reason = "only system calls are allowed between fork and exec")]

use nix::errno::Errno;
use nix::libc::{self, sock_filter, sock_fprog};
use nix::sched::{CloneFlags, unshare};

/// The architecture as seccomp reports it (`AUDIT_ARCH_*`).
#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7;

/// The first system call of the x32 ABI, which has its own numbers for all of them.
const X32_SYSCALLS: u32 = 0x4000_0000;

/// Offsets in `struct seccomp_data`.
const SYSCALL_OFFSET: u32 = 0;
const ARCHITECTURE_OFFSET: u32 = 4;
const FIRST_ARGUMENT_OFFSET: u32 = 16;

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const JUMP_IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const JUMP_IF_GREATER_OR_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

/// Allows every system call, except those that create sockets other than UNIX sockets: `socket` and, because its requests
/// are not filtered, `io_uring_setup`.
static FILTER: [sock_filter; 10] = [
    statement(LOAD, ARCHITECTURE_OFFSET),
    jump(JUMP_IF_EQUAL, ARCHITECTURE, 0, 7),
    statement(LOAD, SYSCALL_OFFSET),
    jump(JUMP_IF_GREATER_OR_EQUAL, X32_SYSCALLS, 5, 0),
    jump(JUMP_IF_EQUAL, libc::SYS_io_uring_setup as u32, 4, 0),
    jump(JUMP_IF_EQUAL, libc::SYS_socket as u32, 0, 2),
    statement(LOAD, FIRST_ARGUMENT_OFFSET),
    jump(JUMP_IF_EQUAL, libc::AF_UNIX as u32, 0, 1),
    statement(RETURN, libc::SECCOMP_RET_ALLOW),
    statement(RETURN, libc::SECCOMP_RET_ERRNO | libc::EACCES as u32),
];

const fn statement(code: u16, k: u32) -> sock_filter {
    sock_filter { code, jt: 0, jf: 0, k }
}

/// `then` and `otherwise` are the numbers of instructions to skip.
const fn jump(code: u16, k: u32, then: u8, otherwise: u8) -> sock_filter {
    sock_filter { code, jt: then, jf: otherwise, k }
}

/// Moves this process into a new network namespace, whose only interface is down. Without the privilege, the filter
/// of [`deny_network_sockets`] is the only protection.
pub(super) fn leave_network() {
    let _ = unshare(CloneFlags::CLONE_NEWNET);
}

/// Prevents this process and its descendants from creating network sockets. It must not be able to gain privileges
/// (`PR_SET_NO_NEW_PRIVS`).
pub(super) fn deny_network_sockets() -> Result<(), Errno> {
    let program = sock_fprog { len: FILTER.len() as u16, filter: FILTER.as_ptr().cast_mut() };
    // SAFETY: the kernel copies the program, which lives until then, and does not change it.
    let result =
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, std::ptr::from_ref(&program)) };
    Errno::result(result).map(drop)
}
