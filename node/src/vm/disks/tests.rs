//! Disks match their plans, and are never recreated or left incomplete.

use std::os::unix::fs::MetadataExt;
use std::process::Command;

use muster_types::ids::InstanceId;
use muster_types::instance::{FencingPolicy, MachineType};
use muster_types::settings::Settings;
use muster_types::spec::{DiskBus, VideoSpec};
use muster_types::vm::ConsolePorts;

use super::*;
use crate::command::Commands;
use crate::image::Images;

const MIB: u64 = 1 << 20;

struct Fixture {
    root: tempfile::TempDir,
    storage: FileStorage,
}

impl Fixture {
    /// Returns `None` if this host cannot inspect images.
    fn new() -> Option<Self> {
        let root = tempfile::tempdir().unwrap();
        let images = Images::new(&Commands::find(), &Settings::defaults());
        if let Some(reason) = images.missing_requirement() {
            muster_testing::skipped(&reason.to_string());
            return None;
        }
        fs::create_dir(root.path().join("conversions")).unwrap();
        Some(Self { storage: FileStorage::new(root.path(), images), root })
    }

    fn dir(&self) -> PathBuf {
        self.root.path().join("machines/one")
    }

    fn path(&self, name: &str) -> String {
        self.dir().join(name).to_string_lossy().into_owned()
    }

    fn conversion(&self, blob: BlobId, kind: &str) -> PathBuf {
        self.root.path().join(format!("conversions/{blob}.{kind}"))
    }

    /// Creates the conversion of a blob: a disk of 4 MiB full of sevens.
    fn base(&self) -> BlobId {
        let blob = BlobId::new();
        let raw = self.root.path().join("raw");
        fs::write(&raw, vec![7; 4 << 20]).unwrap();
        let (raw, to) = (raw.to_string_lossy(), self.conversion(blob, "qcow2"));
        run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &raw, &to.to_string_lossy()]);
        fs::set_permissions(to, Permissions::from_mode(0o444)).unwrap();
        blob
    }

    fn build(&self, plan: &VmPlan) -> Result<()> {
        build(&self.dir(), plan, &DiskSources::new(&self.storage))
    }

    async fn copy(&self, device: &str, thin: bool, compress: bool) -> Result<String> {
        let to = self.root.path().join(format!("copy-{}", uuid::Uuid::new_v4()));
        copy_offline(&self.storage, &self.dir(), device, (thin, compress), &to).await?;
        Ok(to.to_string_lossy().into_owned())
    }
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{arguments:?}: {stdout}{}", String::from_utf8_lossy(&output.stderr));
    stdout
}

/// Accesses a disk like a guest would.
fn write(disk: &str, commands: &[&str]) {
    let mut arguments = vec!["-f", "qcow2"];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    arguments.push(disk);
    run("qemu-io", &arguments);
}

fn disk(device: &str, kind: DiskKind, size: Option<u64>, base: Option<BlobId>) -> DiskPlan {
    DiskPlan { device: device.into(), bus: DiskBus::Virtio, kind, size, base }
}

fn plan(disks: Vec<DiskPlan>) -> VmPlan {
    VmPlan {
        id: InstanceId::new(),
        generation: 1,
        name: "one".into(),
        cpus: 1,
        memory_mb: 128,
        machine_type: MachineType::Pc,
        uefi: false,
        secure_boot: false,
        nvram_template: None,
        disks,
        nics: Vec::new(),
        video: VideoSpec::default(),
        ports: ConsolePorts { console: 30000, vdi: 30001, vdi_tls: None },
        config_drive: None,
        side_channels: Vec::new(),
        fencing: FencingPolicy::None,
        shared_storage: None,
    }
}

#[test]
fn existing_disks_and_their_bases_are_kept() {
    let Some(fixture) = Fixture::new() else { return };
    let base = fixture.base();
    let plan = plan(vec![
        disk("vda", DiskKind::Disk, None, Some(base)),
        disk("vdb", DiskKind::Disk, Some(16 * MIB), Some(base)),
        disk("vdc", DiskKind::Disk, Some(8 * MIB), None),
        disk("sda", DiskKind::Cdrom, None, Some(base)),
        disk("sdb", DiskKind::Cdrom, None, None),
        disk("vdd", DiskKind::ConfigDrive, None, None),
    ]);
    fixture.build(&plan).unwrap();
    for (name, size) in [("vda.qcow2", 4 * MIB), ("vdb.qcow2", 16 * MIB), ("vdc.qcow2", 8 * MIB)] {
        assert!(run("qemu-img", &["check", "-f", "qcow2", &fixture.path(name)]).contains("No errors"));
        let info = run("qemu-img", &["info", "-f", "qcow2", "--output=json", &fixture.path(name)]);
        let info: serde_json::Value = serde_json::from_str(&info).unwrap();
        assert_eq!(info["virtual-size"], size, "{name}");
    }
    run("qemu-img", &["compare", &fixture.path("vda.qcow2"), &fixture.path("sda.base")]);
    assert_eq!(
        fs::metadata(fixture.path("vda.base")).unwrap().ino(),
        fs::metadata(fixture.conversion(base, "qcow2")).unwrap().ino()
    );
    let mut names: Vec<String> = fs::read_dir(fixture.dir())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["sda.base", "vda.base", "vda.qcow2", "vdb.base", "vdb.qcow2", "vdc.qcow2"]);
    // The guest's data is kept, even after the conversion was deleted.
    write(&fixture.path("vda.qcow2"), &["write -P 9 0 4k"]);
    fs::remove_file(fixture.conversion(base, "qcow2")).unwrap();
    fixture.build(&plan).unwrap();
    write(&fixture.path("vda.qcow2"), &["read -P 9 0 4k", "read -P 7 4k 1M"]);
    write(&fixture.path("vdb.qcow2"), &["read -P 7 0 4M", "read -P 0 4M 12M"]);
}

#[test]
fn iso_image_is_linked_as_iso() {
    let Some(fixture) = Fixture::new() else { return };
    let blob = BlobId::new();
    let mut data = vec![0; 1 << 20];
    data[0x8000..0x8006].copy_from_slice(b"\x01CD001");
    fs::write(fixture.conversion(blob, "iso"), &data).unwrap();
    let cdrom = disk("sda", DiskKind::Cdrom, None, Some(blob));
    fixture.build(&plan(vec![cdrom, disk("vda", DiskKind::Disk, Some(2 * MIB), Some(blob))])).unwrap();
    assert!(fs::read(fixture.path("sda.iso")).unwrap() == data);
    let out = fixture.path("out");
    run("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", &fixture.path("vda.qcow2"), &out]);
    assert!(fs::read(out).unwrap().starts_with(&data));
}

#[test]
fn rejects_invalid_disk_plans() {
    let Some(fixture) = Fixture::new() else { return };
    let base = fixture.base();
    let build_error = |disk: DiskPlan| fixture.build(&plan(vec![disk])).unwrap_err();
    let small = build_error(disk("vda", DiskKind::Disk, Some(MIB), Some(base)));
    assert!(
        matches!(&small, Error::Invalid(reason) if reason.contains("1048576") && reason.contains("4194304")),
        "{small}"
    );
    assert!(matches!(build_error(disk("vdb", DiskKind::Disk, None, None)), Error::Invalid(_)));
    assert!(matches!(
        build_error(disk("vdc", DiskKind::Disk, None, Some(BlobId::new()))),
        Error::Unavailable(_)
    ));
    assert!(matches!(build_error(disk("../x", DiskKind::Disk, Some(MIB), None)), Error::Invalid(_)));
    assert_eq!(fs::read_dir(fixture.dir()).unwrap().count(), 1, "only the base of vda");
}

#[test]
fn replaces_incomplete_files_of_a_killed_build() {
    let Some(fixture) = Fixture::new() else { return };
    let plan = plan(vec![disk("vda", DiskKind::Disk, None, Some(fixture.base()))]);
    fs::create_dir_all(fixture.dir()).unwrap();
    for name in [".vda.qcow2.new", ".vda.base.new"] {
        fs::write(fixture.path(name), "half").unwrap();
    }
    fixture.build(&plan).unwrap();
    write(&fixture.path("vda.qcow2"), &["read -P 7 0 4M"]);
    assert_eq!(fs::read_dir(fixture.dir()).unwrap().count(), 2);
}

#[test]
fn does_not_follow_symlinks() {
    let Some(fixture) = Fixture::new() else { return };
    let plan = plan(vec![disk("vda", DiskKind::Disk, Some(MIB), None)]);
    fs::create_dir_all(fixture.dir()).unwrap();
    let other = fixture.root.path().join("other");
    fs::write(&other, "mine").unwrap();
    std::os::unix::fs::symlink(&other, fixture.path("vda.qcow2")).unwrap();
    assert!(matches!(fixture.build(&plan), Err(Error::Internal(_))));
    fs::remove_file(fixture.path("vda.qcow2")).unwrap();
    std::os::unix::fs::symlink(&other, fixture.path(".vda.qcow2.new")).unwrap();
    fixture.build(&plan).unwrap();
    assert_eq!(fs::read(other).unwrap(), b"mine");
}

#[test]
fn nvram_starts_as_the_default_or_a_template() {
    let Some(fixture) = Fixture::new() else { return };
    let firmware = fixture.root.path().join("firmware");
    fs::create_dir(&firmware).unwrap();
    let sources = DiskSources { storage: &fixture.storage, firmware_dir: &firmware };
    let mut plan = plan(Vec::new());
    plan.uefi = true;
    let refused = build(&fixture.dir(), &plan, &sources).unwrap_err();
    assert!(
        matches!(&refused, Error::Conflict(reason) if reason.contains("Debian package ovmf")),
        "{refused}"
    );
    fs::write(firmware.join("OVMF_VARS_4M.fd"), vec![1; 4096]).unwrap();
    fs::write(firmware.join("OVMF_VARS_4M.ms.fd"), vec![2; 4096]).unwrap();
    let nvram = || fs::read(fixture.dir().join(file::NVRAM)).unwrap();
    build(&fixture.dir(), &plan, &sources).unwrap();
    assert_eq!(nvram(), [1; 4096]);
    // An existing NVRAM is kept.
    fs::write(fixture.dir().join(file::NVRAM), "the guest's").unwrap();
    plan.secure_boot = true;
    build(&fixture.dir(), &plan, &sources).unwrap();
    assert_eq!(nvram(), b"the guest's");
    fs::remove_file(fixture.dir().join(file::NVRAM)).unwrap();
    build(&fixture.dir(), &plan, &sources).unwrap();
    assert_eq!(nvram(), [2; 4096]);
    fs::remove_file(fixture.dir().join(file::NVRAM)).unwrap();

    let template = BlobId::new();
    plan.nvram_template = Some(template);
    assert!(matches!(build(&fixture.dir(), &plan, &sources), Err(Error::Unavailable(_))));
    let name = template.to_string();
    let blob = fixture.root.path().join("blobs").join(&name[..2]);
    fs::create_dir_all(&blob).unwrap();
    fs::write(blob.join(&name), vec![3; 100]).unwrap();
    let refused = build(&fixture.dir(), &plan, &sources).unwrap_err();
    assert!(
        matches!(&refused, Error::Invalid(reason) if reason.contains("100") && reason.contains("4096")),
        "{refused}"
    );
    fs::write(blob.join(&name), vec![3; 4096]).unwrap();
    build(&fixture.dir(), &plan, &sources).unwrap();
    assert_eq!(nvram(), [3; 4096]);
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_whole_disk_or_difference_to_its_base() {
    let Some(fixture) = Fixture::new() else { return };
    let base = fixture.base();
    let disks = vec![
        disk("vda", DiskKind::Disk, Some(16 * MIB), Some(base)),
        disk("vdb", DiskKind::Disk, Some(16 * MIB), None),
    ];
    fixture.build(&plan(disks)).unwrap();
    let top = fixture.path("vda.qcow2");
    // Zeros that the guest wrote over data of the base must be in the copy.
    write(&top, &["write -P 9 1M 100k", "write -z 2M 1M", "write -P 8 12M 64k"]);
    write(&fixture.path("vdb.qcow2"), &["write -P 5 3M 64k"]);
    fs::set_permissions(fixture.dir(), fs::Permissions::from_mode(0o700)).unwrap();
    let under = fixture.conversion(base, "qcow2");
    for compress in [false, true] {
        let whole = fixture.copy("vda", false, compress).await.unwrap();
        run("qemu-img", &["compare", &whole, &top]);
        let thin = fixture.copy("vda", true, compress).await.unwrap();
        for copy in [&whole, &thin] {
            let facts = fixture.storage.facts(Path::new(copy)).unwrap();
            assert_eq!((facts.format, facts.virtual_size), (ImageFormat::Qcow2, 16 * MIB));
            run("qemu-img", &["check", "-f", "qcow2", copy]);
        }
        let sizes = [&whole, &thin].map(|copy| fs::metadata(copy).unwrap().blocks());
        assert!(compress || sizes[1] < sizes[0], "{sizes:?}");
        run(
            "qemu-img",
            &["rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", &under.to_string_lossy(), &thin],
        );
        run("qemu-img", &["compare", &thin, &top]);
    }
    // A thin copy of a disk without a base is complete.
    let thin = fixture.copy("vdb", true, false).await.unwrap();
    run("qemu-img", &["compare", &thin, &fixture.path("vdb.qcow2")]);
    assert!(matches!(fixture.copy("vdz", false, false).await, Err(Error::Conflict(_))));
    assert_eq!(fs::read_dir(fixture.root.path().join("work")).unwrap().count(), 0);
}
