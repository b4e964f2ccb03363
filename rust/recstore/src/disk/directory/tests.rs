use std::io::Write;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FileType, mknodat};

use super::*;

/// A directory `inside` beside a file `outside` with known bytes, and in it a file `file` and a directory `below`.
struct Ground {
    temporary: tempfile::TempDir,
    inside: Directory,
}

const KNOWN: &[u8] = b"nobody changes me";

impl Ground {
    fn new() -> Self {
        let temporary = tempfile::tempdir().unwrap();
        fs::write(temporary.path().join("outside"), KNOWN).unwrap();
        let inside = Directory::create(temporary.path().join("inside")).unwrap();
        inside.create_new("file").unwrap().write_all(b"rows").unwrap();
        inside.create_subdirectory("below").unwrap().create_new("file").unwrap();
        Self { temporary, inside }
    }

    fn outside(&self) -> PathBuf {
        self.temporary.path().join("outside")
    }

    /// Makes everything that no name may stand for, and returns the names with what an error says of each.
    fn strange(&self) -> Vec<(&'static str, &'static str)> {
        let at = |name: &str| self.inside.path().join(name);
        symlink(self.outside(), at("link")).unwrap();
        symlink("file", at("link_inside")).unwrap();
        symlink(self.temporary.path().join("missing"), at("dangling")).unwrap();
        symlink("below", at("linked")).unwrap();
        mknodat(&self.inside, "fifo", FileType::Fifo, Mode::from_raw_mode(0o666), 0).unwrap();
        let mut strange = vec![
            ("link", "it is a symbolic link, which is not followed"),
            ("link_inside", "it is a symbolic link, which is not followed"),
            ("dangling", "it is a symbolic link, which is not followed"),
            ("linked/file", "linked: it is a symbolic link, which is not followed"),
            ("fifo", "it is a FIFO, not a regular file"),
            ("below", "it is a directory, not a regular file"),
            ("socket", "it is a socket, not a regular file"),
            ("file/file", "file: it is a regular file, not a directory"),
        ];
        drop(UnixListener::bind(at("socket")).unwrap());
        // Only root may make a device.
        let null = rustix::fs::makedev(1, 3);
        if mknodat(&self.inside, "device", FileType::CharacterDevice, Mode::from_raw_mode(0o666), null)
            .is_ok()
        {
            strange.push(("device", "it is a device, not a regular file"));
        }
        strange
    }

    fn check_untouched(&self) {
        assert_eq!(fs::read(self.outside()).unwrap(), KNOWN);
        assert!(!self.temporary.path().join("missing").exists());
        assert_eq!(fs::read_dir(self.temporary.path()).unwrap().count(), 2);
    }
}

type Call = fn(&Directory, &str) -> io::Result<()>;

#[test]
fn what_is_no_regular_file_is_refused_by_every_call() {
    let ground = Ground::new();
    let strange = ground.strange();
    let before = ground.inside.entries().unwrap();
    let calls: [Call; 9] = [
        |inside, name| inside.open_file(name).map(drop),
        |inside, name| inside.read(name, 100).map(drop),
        |inside, name| inside.open_to_write(name).map(drop),
        |inside, name| inside.append_to(name).map(drop),
        |inside, name| inside.lock_file(name).map(drop),
        |inside, name| inside.create_new(name).map(drop),
        |inside, name| inside.replace(name, b"new"),
        |inside, name| inside.remove_file(name),
        |inside, name| inside.rename("file", name),
    ];
    for (name, reason) in strange {
        for (number, call) in calls.iter().enumerate() {
            let error = call(&ground.inside, name).unwrap_err().to_string();
            let path = ground.inside.path().join(name.split('/').next().unwrap());
            assert!(error.starts_with(path.to_str().unwrap()), "{number} {error}");
            assert!(error.ends_with(reason), "{number}: {error}");
        }
    }
    assert_eq!(ground.inside.entries().unwrap(), before);
    ground.check_untouched();
}

#[test]
fn a_link_is_no_directory() {
    let ground = Ground::new();
    ground.strange();
    symlink(ground.temporary.path(), ground.inside.path().join("up")).unwrap();
    for name in ["linked", "up", "up/inside", "fifo"] {
        let calls: [Call; 4] = [
            |inside, name| inside.subdirectory(name).map(drop),
            |inside, name| inside.create_subdirectory(name).map(drop),
            |inside, name| inside.remove_directory(name),
            |inside, name| inside.remove_tree(name),
        ];
        for call in calls {
            let error = call(&ground.inside, name).unwrap_err().to_string();
            let reason =
                if name == "fifo" { "it is a FIFO, not a directory" } else { "it is a symbolic link" };
            assert!(error.contains(reason), "{error}");
        }
    }
    assert_eq!(ground.inside.subdirectory("below").unwrap().entries().unwrap().len(), 1);
    ground.check_untouched();
}

#[test]
fn names_that_lead_out_are_refused() {
    let ground = Ground::new();
    let outside = ground.outside();
    let absolute = outside.to_str().unwrap();
    for name in [
        "",
        ".",
        "..",
        "../outside",
        "below/../file",
        "below/..",
        "below//file",
        "./file",
        "below/",
        "a\0b",
        absolute,
    ] {
        let calls: [Call; 5] = [
            |inside, name| inside.open_file(name).map(drop),
            |inside, name| inside.replace(name, b"new"),
            |inside, name| inside.remove_tree(name),
            |inside, name| inside.create_subdirectory(name).map(drop),
            |inside, name| inside.rename(name, "other"),
        ];
        for call in calls {
            let error = call(&ground.inside, name).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.to_string().contains("is no name of a file inside a directory"), "{error}");
        }
    }
    ground.check_untouched();
}

#[test]
fn both_ways_of_opening_open_the_same() {
    let ground = Ground::new();
    let strange = ground.strange();
    for way in opening::ways::all() {
        let open = |name: &str, flags| way(ground.inside.as_fd(), Path::new(name), flags);
        for name in ["file", "below/file"] {
            open(name, OFlags::RDONLY).unwrap();
        }
        open("below", OFlags::RDONLY | OFlags::DIRECTORY).unwrap();
        open("lock", OFlags::RDWR | OFlags::CREATE).unwrap();
        assert_eq!(open("lock", OFlags::RDWR | OFlags::CREATE | OFlags::EXCL).unwrap_err(), Errno::EXIST);
        assert_eq!(open("none", OFlags::RDONLY).unwrap_err(), Errno::NOENT);
        for (name, _) in strange.iter().filter(|(_, reason)| reason.contains("symbolic link")) {
            for flags in [OFlags::RDONLY, OFlags::RDWR, OFlags::RDWR | OFlags::CREATE] {
                let errno = open(name, flags).unwrap_err();
                assert!([Errno::LOOP, Errno::NOTDIR].contains(&errno), "{name}: {errno}");
            }
        }
        assert!(open("linked", OFlags::RDONLY | OFlags::DIRECTORY).is_err());
        // Opened without waiting for a writer; what it is shows on the handle.
        open("fifo", OFlags::RDONLY).unwrap();
    }
    ground.check_untouched();
}

#[test]
fn a_file_that_is_exchanged_for_a_link_again_and_again_never_leads_out() {
    let ground = Ground::new();
    let inside = &ground.inside;
    let (ended, at) = (AtomicBool::new(false), |name: &str| inside.path().join(name));
    symlink(ground.outside(), at("link")).unwrap();
    symlink(ground.temporary.path(), at("out")).unwrap();
    fs::create_dir(at("parent")).unwrap();
    fs::write(at("parent/outside"), b"rows").unwrap();
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let exchange = |one: &str, other: &str| {
                for (from, to) in [(one, "away"), (other, one), (one, other), ("away", one)] {
                    fs::rename(at(from), at(to)).unwrap();
                }
            };
            while !ended.load(Ordering::Relaxed) {
                exchange("file", "link");
                exchange("parent", "out");
            }
        });
        for _ in 0..2000 {
            for way in opening::ways::all() {
                for name in ["file", "parent/outside"] {
                    if let Ok(opened) = way(inside.as_fd(), Path::new(name), OFlags::RDWR) {
                        let mut found = Vec::new();
                        File::from(opened).read_to_end(&mut found).unwrap();
                        assert_eq!(found, b"rows");
                    }
                }
            }
        }
        ended.store(true, Ordering::Relaxed);
    });
    assert_eq!(fs::read(ground.outside()).unwrap(), KNOWN);
}

#[test]
fn a_held_directory_stays_the_same_when_its_path_leads_elsewhere() {
    let ground = Ground::new();
    let other = ground.temporary.path().join("other");
    fs::rename(ground.inside.path(), &other).unwrap();
    fs::create_dir(ground.inside.path()).unwrap();
    assert_eq!(ground.inside.read("file", 4).unwrap(), b"rows");
    ground.inside.replace("file", b"new").unwrap();
    assert_eq!(fs::read(other.join("file")).unwrap(), b"new");
    assert_eq!(fs::read_dir(ground.inside.path()).unwrap().count(), 0);
}

#[test]
fn the_own_path_may_lead_over_links() {
    let ground = Ground::new();
    let link = ground.temporary.path().join("link");
    symlink(ground.inside.path(), &link).unwrap();
    assert_eq!(Directory::open(&link).unwrap().read("file", 4).unwrap(), b"rows");
    let made = Directory::create(link.join("a/b")).unwrap();
    assert_eq!((made.path(), made.entries().unwrap()), (&*link.join("a/b"), vec![]));
    let error = Directory::open(ground.outside()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotADirectory);
}

#[test]
fn files_are_read_replaced_and_removed() {
    let ground = Ground::new();
    let inside = &ground.inside;
    inside.replace("below/manifest.json", b"one").unwrap();
    // What a crash left beside it.
    inside.create_new("below/manifest.new").unwrap().write_all(b"cut o").unwrap();
    inside.replace("below/manifest.json", b"two").unwrap();
    assert_eq!(inside.read("below/manifest.json", 3).unwrap(), b"two");
    let error = inside.read("below/manifest.json", 2).unwrap_err().to_string();
    assert!(error.contains("it has more than 2 bytes"), "{error}");
    let below = inside.subdirectory("below").unwrap();
    let names: Vec<_> = below.entries().unwrap().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["file", "manifest.json"]);
    inside.append_to("file").unwrap().write_all(b" and more").unwrap();
    inside.lock_file("file").unwrap();
    assert_eq!(inside.read("file", 100).unwrap(), b"rows and more");
    inside.rename("below/manifest.json", "file").unwrap();
    assert_eq!(inside.read("file", 100).unwrap(), b"two");
    assert_eq!(inside.create_new("file").unwrap_err().kind(), ErrorKind::AlreadyExists);
    inside.link("file", &below).unwrap_err();
    inside.rename("below/file", "below/other").unwrap();
    inside.link("file", &below).unwrap();
    assert_eq!(below.read("file", 100).unwrap(), b"two");
    inside.remove_file("file").unwrap();
    assert_eq!(inside.remove_file("file").unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(inside.kind("none/file").unwrap(), None);
}

#[test]
fn a_tree_is_removed_with_its_links_and_without_what_they_lead_to() {
    let ground = Ground::new();
    let inside = &ground.inside;
    inside.create_subdirectory("below/deeper").unwrap().create_new("rows").unwrap();
    symlink(ground.outside(), inside.path().join("below/deeper/link")).unwrap();
    symlink(ground.temporary.path(), inside.path().join("below/up")).unwrap();
    mknodat(inside, "below/fifo", FileType::Fifo, Mode::from_raw_mode(0o666), 0).unwrap();
    assert_eq!(inside.remove_directory("below").unwrap_err().kind(), ErrorKind::DirectoryNotEmpty);
    inside.remove_tree("below").unwrap();
    assert_eq!(inside.entries().unwrap(), [(OsString::from("file"), FileKind::File)]);
    ground.check_untouched();
}
